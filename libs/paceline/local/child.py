"""Owns one child process: its start, its watch for stops, its kill, its log and the reason of its
end. A restart makes a new Child; RestartPolicy (launch.py) decides when.

A child that is stopped (SIGSTOP) for longer than a limit is killed, if all looks at its state found
it stopped. There are six looks per limit, and no clock: a pause of this process counts once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import zmq

from paceline.config import RunConfig
from paceline.local import processes
from paceline.local.patience import patient

LIMIT_S = RunConfig().heartbeat_s
"""Default of run.heartbeat_s: maximum seconds of a child's stop."""
_LOOKS = 6  # per limit
_REAP_S = 5.0
_Stop = tuple[int, int]  # (process, context switches); the count rises when the process runs


class Forked:
    """The process of a fork, for Child. It dies when its order's connection closes."""

    def __init__(
        self, pid: int, news: asyncio.StreamReader, connection: asyncio.StreamWriter
    ) -> None:
        self.pid = pid
        self._connection = connection
        self._reading = asyncio.create_task(self._read(news))

    @property
    def returncode(self) -> int | None:
        """Exit status, or minus the number of the signal that killed it; None while it runs."""
        return self._reading.result() if self._reading.done() else None

    async def wait(self) -> int:
        """Waits for the end and returns the returncode."""
        return await asyncio.shield(self._reading)

    def send_signal(self, number: int) -> None:
        """Sends a signal; does nothing after the end."""
        if not self._reading.done():
            with suppress(ProcessLookupError):  # the child's end is being reported
                os.kill(self.pid, number)

    async def _read(self, news: asyncio.StreamReader) -> int:
        """Returns the exit status. Without a status the forkserver is gone, and the kernel has
        killed this process.
        """
        line = b""
        with suppress(ConnectionError):
            line = await news.readline()
        self._connection.close()
        return int(json.loads(line)["code"]) if line else -signal.SIGKILL


class Child:
    """A running process; `ended` is done with its exit status once it has ended."""

    def __init__(
        self,
        process: asyncio.subprocess.Process | Forked,
        log: Path | None = None,
        log_begins: int = 0,
        *,
        leads: bool = False,
        tree: bool = False,
        stop_s: float = 0.0,
    ) -> None:
        """`log`: file of its output, which begins at byte `log_begins`. `leads`: it leads a process
        group, which ends with it. `stop_s`: maximum seconds of a stop; 0: no limit. `tree`: its
        descendants have this limit too.
        """
        self.process, self.pid = process, process.pid
        self.log, self._log_begins = log, log_begins
        self._leads, self._tree = leads, tree
        self.verdict = ""
        """Reason of a kill, as a continuation of the exit description."""
        self.ended: asyncio.Task[int] = asyncio.create_task(self._watch(stop_s))

    @classmethod
    async def execute(
        cls,
        *command: str,
        log: Path | None = None,
        stop_s: float = 0.0,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Child:
        """Starts a program in its own session: Ctrl-C does not reach it, and its group is killed as
        a whole. It dies with this process if it calls die_with_parent.

        Output is appended to `log`, or goes to this process's output. `options`: of
        asyncio.create_subprocess_exec. Raises OSError.
        """
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") if log is not None else nullcontext() as output:
            begins = output.tell() if output is not None else 0
            given = {
                "env": processes.child_environment(dict(environment or {})),
                "stdin": asyncio.subprocess.DEVNULL,
                "stdout": output,
                "stderr": output,
                **options,
            }
            process = await asyncio.create_subprocess_exec(
                *command, start_new_session=True, **given
            )
        return cls(process, log, begins, leads=True, stop_s=stop_s)

    @property
    def returncode(self) -> int | None:
        """Exit status, or minus the number of the signal that killed it; None while it runs."""
        return self.ended.result() if self.ended.done() else None

    @property
    def program(self) -> asyncio.subprocess.Process:
        """The process of an executed program, with its pipes."""
        assert isinstance(self.process, asyncio.subprocess.Process)
        return self.process

    @classmethod
    async def piped(cls, *command: str, environment: Mapping[str, str] | None = None) -> Child:
        """`execute` for a program that exchanges lines over stdin and stdout."""
        pipes: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "limit": processes.MAX_LINE_BYTES}
        return await cls.execute(*command, environment=environment, **pipes)

    @property
    def output(self) -> asyncio.StreamReader:
        """Lines of a piped program."""
        assert self.program.stdout is not None
        return self.program.stdout

    def send(self, line: bytes) -> None:
        """Sends a line to a piped program without waiting; a lost one receives none."""
        assert self.program.stdin is not None
        if not self.program.stdin.is_closing():
            self.program.stdin.write(line)

    async def ask(self, line: bytes, limit_s: float) -> bytes:
        """The next line of a piped program after it has received a line. Stops a program without a
        whole answer; then raises ConnectionError, or TimeoutError after `limit_s`.
        """
        answer = b""
        try:
            async with asyncio.timeout(limit_s):
                self.send(line)
                assert self.program.stdin is not None
                await self.program.stdin.drain()
                answer = await self.output.readuntil(b"\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise ConnectionError(str(error)) from error
        finally:
            if not answer:
                await self.stop()
        return answer

    async def wait(self) -> int:
        """Waits for the end and returns the exit status."""
        return await asyncio.shield(self.ended)

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process alone; does nothing after the end."""
        if not self.ended.done():
            with suppress(ProcessLookupError):  # the child's end is being reported
                self.process.send_signal(number)

    def kill(self, verdict: str = "") -> None:
        """Sends SIGKILL, to the whole group if it leads one. `verdict`: the reason."""
        if not self.ended.done():
            self.verdict = self.verdict or verdict
            self.send_signal(signal.SIGKILL)
            self._kill_group()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Sends SIGTERM, waits `grace_s` seconds, sends SIGKILL and waits for the end.

        A process that the kernel does not release, or a stopped reporter of its end, delays the
        return by a few seconds only.
        """
        if grace_s:
            self.send_signal(signal.SIGTERM)
            await asyncio.wait({self.ended}, timeout=grace_s)
        self.kill()
        await asyncio.wait({self.ended}, timeout=patient(_REAP_S))

    def last_words(self) -> str:
        """One line: its exit, the reason, its last error line and the path of its log."""
        if self.log is None:
            return processes.describe_exit(self.ended.result()) + self.verdict
        return processes.last_words(self.ended.result(), self.log, self._log_begins, self.verdict)

    def last_lines(self) -> str:
        """The end of its log; "" without a log."""
        if self.log is None:
            return ""
        return processes.last_lines(self.log, since=self._log_begins)

    async def _watch(self, stop_s: float) -> int:
        ending = asyncio.ensure_future(self.process.wait())
        stopped = asyncio.create_task(self._find_stop(stop_s))
        try:
            await asyncio.wait({ending, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                self.kill(f", stopped for {stop_s:g} s")
                # The process that reports the end may be stopped too.
                await asyncio.wait({ending}, timeout=stop_s)
            return ending.result() if ending.done() else -signal.SIGKILL
        finally:
            ending.cancel()
            stopped.cancel()
            self._kill_group()

    def _kill_group(self) -> None:
        if self._leads:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _find_stop(self, limit_s: float) -> None:
        """Returns when a process has been stopped without a break for longer than the limit."""
        looks, since = 0, frozenset[_Stop]()
        while looks <= _LOOKS:
            await asyncio.sleep(limit_s / _LOOKS or float("inf"))
            seen = _stops([self.pid, *(_descendants(self.pid) if self._tree else ())])
            looks, since = (looks + 1, since & seen) if since & seen else (0, seen)


def _stops(processes: Iterable[int]) -> frozenset[_Stop]:
    """(process, context switches) of each process that is stopped now."""
    found = set()
    for one in processes:
        with suppress(psutil.Error, OSError):  # the child has ended, or no file can be opened
            if (process := psutil.Process(one)).status() == psutil.STATUS_STOPPED:
                found.add((one, process.num_ctx_switches().voluntary))
    return frozenset(found)


def _descendants(pid: int) -> list[int]:
    """Process ids of all descendants, as Linux lists them; [] on other systems."""
    found: list[int] = []
    with suppress(OSError):  # the child has ended, or no file can be opened
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, path.read_text().split())
    return found + [below for child in found for below in _descendants(child)]


class ChildSocket:
    """The parent's end of a child's socket, bound to an address that one child connects to.

    It delivers messages in the event loop turn that reads them, without a future or a task's
    wake-up. Use on one event loop.
    """

    def __init__(
        self, context: zmq.Context[Any], address: str, on_message: Callable[[bytes], None]
    ) -> None:
        """The event loop logs an exception of `on_message`, and reading continues with the next
        message.
        """
        self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # commands queue here while the child is busy
        self._socket.bind(address)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self.read)
        self.received = 0
        """Messages received so far."""

    def send(self, message: bytes) -> None:
        """Send without waiting; messages to a lost child are dropped."""
        with suppress(zmq.Again):
            self._socket.send(message, zmq.NOBLOCK)
        # The descriptor signals only the first waiting message, and sending may have cleared that
        # signal.
        self._loop.call_soon(self.read)

    def read(self) -> None:
        """Deliver one message, and schedule the next read in the next turn of the event loop. A
        fast child must not starve the rest of the loop.
        """
        if self._socket.closed:
            return
        try:
            message = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        self.received += 1
        self._loop.call_soon(self.read)
        self._on_message(message)

    def close(self) -> None:
        """Stop sending and delivering."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
