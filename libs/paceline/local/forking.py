"""Starts processes of a Python module by forking one that has imported it already.

An import of torch and transformers takes seconds of a core, each time and in each process. Here one
process, `python -m paceline.local.forking MODULE [MORE ...]`, imports, and then only waits for
orders; each of its forks runs `MODULE.main()` and shares the memory of the imports.

A fork goes on safely if its parent had one thread and no GPU open. Where that is not certain, it
begins anew with `python -m MODULE`, which is as slow as a start without this, and as right.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from paceline.errors import DeadlineExceeded, Unavailable
from paceline.local.processes import PARENT_VARIABLE, child_environment, die_with_parent

_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # numpy's BLAS begins its threads when imported
_ENDINGS = {signal.SIGCHLD}


class Forked:
    """One process, used like asyncio's."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        """As asyncio's: minus the signal that killed it; None while it runs."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """The returncode, once it has ended."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        """Nothing once it has ended."""
        if not self._ended.done():
            with suppress(ProcessLookupError):  # its end is being told
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def end(self, code: int) -> None:
        """Its parent has told how it ended."""
        if not self._ended.done():
            self._ended.set_result(code)


class Forker:
    """Forks processes of one module, on one event loop. Its first order starts the process that
    imports; all end with `close`, or when this process is gone.
    """

    def __init__(
        self, module: str, more: Sequence[str], environment: Mapping[str, str], log: Path | None
    ) -> None:
        """`more`: modules that it imports besides; `environment`: of all its processes; `log`:
        takes what the imports print, None is this process's own output.
        """
        self._modules = [module, *more]
        self._environment = {**_ONE_THREAD, **environment}
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._ordered: deque[asyncio.Future[Forked]] = deque()
        self._living: dict[int, Forked] = {}

    async def fork(
        self, environment: Mapping[str, str], log: Path | None, deadline_s: float
    ) -> Forked:
        """A new process with these variables besides, its output appended to `log`, its input
        empty.

        Raises Unavailable when the process that imports ends first, DeadlineExceeded when it still
        imports at the deadline.
        """
        async with self._starting:
            if self._reading is None or self._reading.done():
                await self.close()
                await self._start()
        forked: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._ordered.append(forked)
        order = {"environment": dict(environment), "log": log and str(log)}
        self._orders.write(json.dumps(order).encode() + b"\n")
        try:
            async with asyncio.timeout(deadline_s):
                return await forked
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self._modules[0]} is not imported", seen=f"{deadline_s:.1f} s"
            ) from error

    async def close(self) -> None:
        """Ends the process that imports, and with it all that it has forked."""
        if self._process is not None and self._reading is not None:
            self._orders.close()
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
            await self._reading
            self._process = self._reading = None

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = (sys.executable, "-m", __name__, *self._modules)
        with theirs, self._log.open("ab") if self._log else nullcontext() as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env=child_environment(self._environment),
            )
        news, self._orders = await asyncio.open_unix_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(news))

    async def _read(self, news: asyncio.StreamReader) -> None:
        with suppress(ConnectionResetError):
            async for line in news:
                pid, code = json.loads(line)
                forked = self._living.setdefault(pid, Forked(pid))
                if code is None:
                    if (order := self._ordered.popleft()).cancelled():
                        forked.kill()
                    else:
                        order.set_result(forked)
                else:
                    self._living.pop(pid).end(code)
        for forked in self._living.values():  # the kernel has killed them
            forked.end(-signal.SIGKILL)
        for order in self._ordered:
            if not order.cancelled():
                order.set_exception(Unavailable(f"{self._modules[0]} cannot be started"))
        self._living.clear()
        self._ordered.clear()


# --- the process that imports ---------------------------------------------------------------------


def main() -> None:
    """Imports, then forks as it is told until its input ends; a fork returns from here too, when
    its module's main has.
    """
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # whoever started it ends it
    gc.disable()  # a quarter of the time of an import of torch and transformers
    for module in sys.argv[1:]:
        with suppress(Exception, SystemExit):  # it is imported again, and fails, in the fork
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection would write to the pages that are shared
    gc.enable()
    parent, own_pid = socket.socket(fileno=0), os.getpid()

    def tell(pid: int, code: int | None) -> None:
        parent.sendall(json.dumps([pid, code]).encode() + b"\n")

    def reap(*_: object) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                tell(ended[0], os.waitstatus_to_exitcode(ended[1]))

    signal.signal(signal.SIGCHLD, reap)
    orders = parent.makefile("rb")
    for order in orders:
        safe = _is_safe_to_fork()
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)  # until its beginning is told
        pid = os.fork()
        if not pid:
            parent.detach()
            _become(**json.loads(order), parent=own_pid, safe=safe)
            return
        tell(pid, None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)


def _is_safe_to_fork() -> bool:
    """Whether this process has one thread and no GPU open; False where that cannot be seen."""
    try:
        threads = os.listdir("/proc/self/task")
        with os.scandir("/proc/self/fd") as opened:  # itself opened until its end
            files = [os.readlink(each.path) for each in opened]
    except OSError:
        return False
    return len(threads) == 1 and not any(name.startswith("/dev/nvidia") for name in files)


def _become(environment: Mapping[str, str], log: str | None, *, parent: int, safe: bool) -> None:
    """Runs the module in this fork."""
    os.environ.update({**environment, PARENT_VARIABLE: str(parent)})
    die_with_parent()
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if log is not None:
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
    module = sys.argv[1]
    if not safe:
        os.execv(sys.executable, [sys.executable, "-m", module])  # noqa: S606 - no shell is meant
    sys.argv = [module]
    sys.exit(importlib.import_module(module).main())


if __name__ == "__main__":
    main()
