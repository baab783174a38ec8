"""Starts, queries and stops child processes of a bench, and measures their cost.

A child reads one JSON line per request from its standard input and answers with one line on its
standard output. It ends when its input closes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import psutil

from paceline.errors import DeadlineExceeded, Unavailable
from paceline.local.redis import RedisLauncher, Role
from paceline.streams import connect

ANSWER_DEADLINE_S = 120.0


def running(module: str, pid: int | None = None) -> list[psutil.Process]:
    """Processes below `pid`, else below this process, that run a module, in the order of their
    start.

    Ranks and engine workers match too, although another process than their service forks them.
    """
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            # The name must end here: settings on a command line begin with names of services.
            if f"-m {module} " in " ".join([*process.cmdline(), ""]) and (
                process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
    return sorted(found, key=lambda one: (one.create_time(), one.pid))


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Processes of this machine that have inherited this value of an environment variable."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(variable) == value:
                found.append(process)
    return found


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of processes between two readings."""

    cpu_s: float
    peak_rss_mib: float


class Meter:
    """CPU seconds and peak resident memory of a process, since the meter was made."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._cpu_s = self._cpu()
        _reset_peak(pid)

    def read(self) -> Cost:
        """Cost since the meter was made; the peak includes memory that was resident before."""
        return Cost(self._cpu() - self._cpu_s, _peak_mib(self._process.pid))

    def _cpu(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


class BenchChild:
    """A running child that answers requests."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self._name = name

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def ask(self, **request: Any) -> Mapping[str, Any]:
        """Sends a request and waits for the answer. Raises Unavailable if the child has ended,
        DeadlineExceeded if the answer is late.
        """
        self.tell(**request)
        return await self.answer()

    def tell(self, **request: Any) -> None:
        """Sends a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")

    async def answer(self, deadline_s: float = ANSWER_DEADLINE_S) -> Mapping[str, Any]:
        """Waits for the next answer. Raises Unavailable if the child has ended, DeadlineExceeded if
        the answer is late.
        """
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(deadline_s):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self._name} does not answer", allowed=f"{deadline_s} s"
            ) from error
        if not line:
            raise Unavailable(
                f"{self._name} ended before it answered", seen=self._process.returncode
            )
        answer: Mapping[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def child(module: str, *argv: str) -> AsyncIterator[BenchChild]:
    """Runs `python -m module argv` for the time of the block."""
    command = (sys.executable, "-m", module, *argv)
    async with answering(f"{module} {' '.join(argv)}".strip(), command) as one:
        yield one


@asynccontextmanager
async def answering(
    name: str,
    command: Sequence[str],
    log: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[BenchChild]:
    """Runs a command for the time of the block; its standard error goes to `log`, else to this
    process's.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        env=environment,
    )
    try:
        yield BenchChild(process, name)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await _ended(process)


async def redis_server(stack: AsyncExitStack, role: Role) -> tuple[str, int]:
    """Starts a Redis server as a local run does; returns its URL and process id."""
    run = Path(stack.enter_context(TemporaryDirectory(prefix="paceline-bench-")))
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    environment["PACELINE_PARENT_PID"] = str(os.getpid())  # the server ends with this process
    url = RedisLauncher(role, run / f"redis-{role}").url
    argv = ("-m", "paceline.local.redis", "--role", role, f"run.dir={run}")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, stdout=asyncio.subprocess.DEVNULL, env=environment
    )

    async def stop() -> None:
        process.terminate()
        await process.wait()

    stack.push_async_callback(stop)
    async with connect(url, outage_s=20) as client:
        await client.ping()
    return url, process.pid


async def _ended(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(5):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _reset_peak(pid: int) -> None:
    """Resets VmHWM (proc(5), clear_refs). Without permission, the peak covers the whole life of the
    process.
    """
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        return


def _peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return psutil.Process(pid).memory_info().rss / 2**20
