"""Starts processes by forks of a process that has already imported their module (forkserver.py).

Under a supervisor it uses the run's forkserver, otherwise its own. Imports of torch and
transformers take seconds of a core in each process. Forks share the time and memory of one import.
"""

import asyncio
import itertools
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from paceline.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from paceline.local import child, forkserver, launch, patience, processes, user_directory
from paceline.local.forkserver import ORDER_BYTES, ForkOrder

FORKSERVER_VARIABLE = "PACELINE_FORKSERVER"
"""Socket path of the run's forkserver; absent or "" without one."""

IMPORT_ENVIRONMENT = {
    name: os.environ.get(name, value)
    for name, value in {"OPENBLAS_NUM_THREADS": "1", "GOMP_SPINCOUNT": "2000"}.items()
}
"""Environment of the importing process, which its libraries read at import.

numpy's BLAS starts its threads then. libgomp's threads, which compute torch's products, turn this
often before they sleep. After libgomp's own 300,000 turns they have used up their share of a core
that other processes want. Rounds of decoding then take several times as long as after 2,000, and
without such processes equally long (benchmarks/results/2026-11-30-peers.md).
"""

_WAITING = 128
_numbers = itertools.count(1)


class Forker:
    """Forks processes, on one event loop. The forks of its own forkserver end with `close` or with
    this process.
    """

    def __init__(self, modules: Sequence[str], log: Path | None) -> None:
        """`modules`: imports of its own forkserver. `log`: file for their output; None: this
        process's output.
        """
        self._modules = modules
        self._log = log
        self._own: child.Child | None = None
        self.path = ""
        """Socket path of its own forkserver; "" before it exists."""
        self._starting = asyncio.Lock()

    async def begin(self) -> None:
        """Starts its own forkserver early, unless the run has one."""
        if not os.environ.get(FORKSERVER_VARIABLE, ""):
            async with self._starting:
                await self._begin()

    async def fork(
        self,
        module: str,
        environment: Mapping[str, str],
        log: Path | None,
        deadline_s: float,
        *,
        stop_s: float = 0.0,
        tree: bool = False,
    ) -> child.Child:
        """Forks a process that runs the module's main().

        `environment` is added to this process's variables. Output is appended to `log`, or to this
        process's output if None. Stdin is empty. `stop_s`, `tree`: as in Child.

        Raises Unavailable if the forkserver ends first, ResourceExhausted if the environment is too
        long. Raises DeadlineExceeded after `deadline_s` seconds, or longer on a busy machine. Its
        own forkserver is then stopped, and the next call starts another.
        """
        order = self._order(module, environment, log)
        try:
            forked, begins = await patience.within(deadline_s, order, f"{module} is not imported")
        except DeadlineExceeded:
            await self.close()
            raise
        return child.Child(forked, log, begins, stop_s=stop_s, tree=tree)

    async def close(self) -> None:
        """Stops its own forkserver and all its forks."""
        own, self._own = self._own, None  # a concurrent call has nothing to stop
        if own is not None:
            os.unlink(self.path)
            await own.stop()

    async def _order(
        self, module: str, environment: Mapping[str, str], log: Path | None
    ) -> tuple[child.Forked, int]:
        """Returns the process and the byte of its log at which its output begins."""
        whole = processes.child_environment(dict(environment))
        described = ForkOrder(module=module, environment=whole, directory=os.getcwd())
        order = json.dumps(described).encode() + b"\n"
        if len(order) > ORDER_BYTES:
            message = "the environment is too long"
            raise ResourceExhausted(message, seen=f"{len(order)} bytes", allowed=ORDER_BYTES)
        connection = await self._connected()
        try:
            with log.open("ab") if log else nullcontext() as file:
                outputs, begins = ([file.fileno()] * 2, file.tell()) if file else ([1, 2], 0)
                socket.send_fds(connection, [order[:1]], outputs)  # room for one byte is certain
            return child.Forked(*await _asked(connection, order[1:])), begins
        except Unavailable as error:
            raise Unavailable(f"{module} cannot be started", seen=error) from error
        except BaseException:
            connection.close()
            raise

    async def _connected(self) -> socket.socket:
        if shared := os.environ.get(FORKSERVER_VARIABLE, ""):
            return await _connect(shared)
        async with self._starting:
            if self._own is not None and not self._own.ended.done():
                with suppress(Unavailable):  # the forkserver is just ending
                    await _imported(self.path)
                    return await _connect(self.path)
            await self._begin()
            return await _connect(self.path)

    async def _begin(self) -> None:
        await self.close()
        listening = listen()
        self.path = listening.getsockname()
        with listening:
            self._own = await child.Child.execute(
                *_command(self._modules),
                log=self._log,
                environment=IMPORT_ENVIRONMENT,
                stdin=listening.fileno(),
            )


async def _asked(
    connection: socket.socket, order: bytes
) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends an order. Returns the process id of the reply and the connection's streams. Raises
    Unavailable and closes the connection without a reply.
    """
    news, writer = await asyncio.open_unix_connection(sock=connection)
    line = b""
    try:
        with suppress(ConnectionError):
            writer.write(order)
            line = await news.readline()
    finally:
        if not line:
            writer.close()
    if not line:
        raise Unavailable("the process that imports has ended")
    return int(json.loads(line)["pid"]), news, writer


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
    """A listening socket for a forkserver, in this process's socket directory."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(user_directory.socket_directory() / f"forks-{next(_numbers)}"))
    listening.listen(_WAITING)
    return listening


async def _imported(path: str) -> None:
    """Waits until the forkserver has imported all modules. Raises Unavailable."""
    _, _, writer = await _asked(await _connect(path), b"\n")
    writer.close()


def forkserver_launch(modules: Sequence[str]) -> launch.Launch:
    """The launch of a run's forkserver. Its socket stays open across restarts, so orders during a
    restart wait.
    """
    listening = listen()
    path: str = listening.getsockname()

    async def healthy(deadline_s: float) -> None:
        async with patience.deadline(deadline_s, "a forkserver imports"):
            await _imported(path)

    return launch.Launch(
        "forkserver",
        _command(modules),
        healthy,
        environment={**IMPORT_ENVIRONMENT, FORKSERVER_VARIABLE: path},
        ping=healthy,
        listening=listening,
    )
