"""Orders processes from one that has imported their module (forkserver.py): the run's, where a
supervisor keeps one, else one of its own.

An import of torch and transformers takes seconds of a core, each time and in each process; forks
share it, its time and its memory.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

from paceline.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from paceline.local import forkserver
from paceline.local.forkserver import ORDER_BYTES, ForkOrder
from paceline.local.launch import Launch
from paceline.local.process_directory import socket_directory
from paceline.local.processes import child_environment

FORKSERVER_VARIABLE = "PACELINE_FORKSERVER"
"""Path of the socket of the run's forkserver; absent or "" where there is none."""

IMPORT_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
"""Of the process that imports: numpy's BLAS begins its threads when it is imported."""

_WAITING = 128
_numbers = itertools.count(1)


class Forked:
    """One process, used like asyncio's. It lasts no longer than its order's connection."""

    def __init__(
        self, pid: int, news: asyncio.StreamReader, connection: asyncio.StreamWriter
    ) -> None:
        self.pid = pid
        self._connection = connection
        self._reading = asyncio.create_task(self._read(news))

    @property
    def returncode(self) -> int | None:
        """As asyncio's: minus the signal that killed it; None while it runs."""
        return self._reading.result() if self._reading.done() else None

    async def wait(self) -> int:
        """The returncode, once it has ended."""
        return await asyncio.shield(self._reading)

    def send_signal(self, number: int) -> None:
        """Nothing once it has ended."""
        if not self._reading.done():
            with suppress(ProcessLookupError):  # its end is being told
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    async def _read(self, news: asyncio.StreamReader) -> int:
        """Its exit status; without one its parent has gone, and the kernel has killed it."""
        line = b""
        with suppress(ConnectionError):
            line = await news.readline()
        self._connection.close()
        return int(json.loads(line)["code"]) if line else -signal.SIGKILL


class Forker:
    """Orders processes, on one event loop. Those of a forkserver of its own end with `close`, and
    when this process is gone.
    """

    def __init__(self, modules: Sequence[str], log: Path | None) -> None:
        """`modules`: that a forkserver of its own imports; `log`: takes what their imports print,
        None is this process's own output.
        """
        self._modules = modules
        self._log = log
        self._own: asyncio.subprocess.Process | None = None
        self.path = ""
        """Of the socket of its own forkserver; "" before it has one."""
        self._starting = asyncio.Lock()

    async def begin(self) -> None:
        """Starts a forkserver of its own, unless the run has one: orders find it importing."""
        if not os.environ.get(FORKSERVER_VARIABLE, ""):
            async with self._starting:
                await self._begin()

    async def fork(
        self, module: str, environment: Mapping[str, str], log: Path | None, deadline_s: float
    ) -> Forked:
        """A new process that runs the module's main() with these variables besides this process's,
        its output appended to `log`, None as this process's own; its input is empty.

        Raises Unavailable when the process that imports ends first, DeadlineExceeded when it has
        not answered at the deadline; one of its own is then ended, and the next order starts
        another. ResourceExhausted for an environment that is too long.
        """
        try:
            async with asyncio.timeout(deadline_s):
                return await self._order(module, environment, log)
        except TimeoutError as error:
            await self.close()
            raise DeadlineExceeded(
                f"{module} is not imported", seen=f"{deadline_s:.1f} s"
            ) from error

    async def close(self) -> None:
        """Ends its own forkserver, and with it all that was forked."""
        if self._own is not None:
            if self._own.returncode is None:
                self._own.kill()
            await self._own.wait()
            self._own = None
            os.unlink(self.path)

    async def _order(self, module: str, environment: Mapping[str, str], log: Path | None) -> Forked:
        whole = child_environment(dict(environment))
        order = json.dumps(asdict(ForkOrder(module, whole, os.getcwd()))).encode() + b"\n"
        if len(order) > ORDER_BYTES:
            raise ResourceExhausted(
                "the environment is too long", seen=f"{len(order)} bytes", allowed=ORDER_BYTES
            )
        connection = await self._connected()
        try:
            with log.open("ab") if log else nullcontext() as file:
                outputs = [file.fileno()] * 2 if file else [1, 2]
                socket.send_fds(connection, [order[:1]], outputs)  # there is room for one byte
            return await _ordered(module, connection, order[1:])
        except BaseException:
            connection.close()
            raise

    async def _connected(self) -> socket.socket:
        if shared := os.environ.get(FORKSERVER_VARIABLE, ""):
            return await _connect(shared)
        async with self._starting:
            if self._own is not None and self._own.returncode is None:
                with suppress(Unavailable):  # it is just ending
                    await _imported(self.path)
                    return await _connect(self.path)
            await self._begin()
            return await _connect(self.path)

    async def _begin(self) -> None:
        await self.close()
        listening = listen()
        self.path = listening.getsockname()
        with listening, self._log.open("ab") if self._log else nullcontext() as log:
            self._own = await asyncio.create_subprocess_exec(
                *_command(self._modules),
                stdin=listening.fileno(),
                stdout=log,
                stderr=log,
                env=child_environment(IMPORT_ENVIRONMENT),
            )


async def _ordered(module: str, connection: socket.socket, order: bytes) -> Forked:
    news, writer = await asyncio.open_unix_connection(sock=connection)
    try:
        pid = await _asked(order, news, writer)
    except Unavailable as error:
        raise Unavailable(f"{module} cannot be started", seen=error) from error
    except BaseException:
        writer.close()
        raise
    return Forked(pid, news, writer)


async def _asked(order: bytes, news: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    """The process id that an order is answered with; Unavailable closes the connection."""
    line = b""
    with suppress(ConnectionError):
        writer.write(order)
        line = await news.readline()
    if not line:
        writer.close()
        raise Unavailable("the process that imports has ended")
    return int(json.loads(line)["pid"])


async def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, path)
    except OSError as error:
        connection.close()
        raise Unavailable("no forkserver answers", seen=f"{path}: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _command(modules: Sequence[str]) -> tuple[str, ...]:
    return sys.executable, "-m", forkserver.__name__, *modules


def listen() -> socket.socket:
    """A socket of a forkserver's, in the directory of this process's sockets."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(socket_directory() / f"forks-{next(_numbers)}"))
    listening.listen(_WAITING)
    return listening


async def answers(path: str, deadline_s: float) -> None:
    """Waits until the forkserver there has imported all. Raises DeadlineExceeded, Unavailable."""
    try:
        async with asyncio.timeout(deadline_s):
            await _imported(path)
    except TimeoutError as error:
        raise DeadlineExceeded("a forkserver imports", seen=f"{deadline_s:.1f} s") from error


async def _imported(path: str) -> None:
    news, writer = await asyncio.open_unix_connection(sock=await _connect(path))
    try:
        await _asked(b"\n", news, writer)
    finally:
        writer.close()


def forkserver_launch(modules: Sequence[str]) -> Launch:
    """How to start a run's forkserver. Its socket stays open between two lives of it: who orders
    meanwhile waits.
    """
    listening = listen()
    path: str = listening.getsockname()

    async def healthy(deadline_s: float) -> None:
        await answers(path, deadline_s)

    return Launch(
        "forkserver",
        _command(modules),
        healthy,
        environment={**IMPORT_ENVIRONMENT, FORKSERVER_VARIABLE: path},
        ping=healthy,
        listening=listening,
    )
