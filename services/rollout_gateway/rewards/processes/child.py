"""Starts, asks, ends and replaces a child process that scores; the gateway's end.

A child is the leader of a process group: what its rules have started ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

from paceline.errors import DataLoss, DeadlineExceeded, Unavailable
from paceline.local.process_directory import process_directory
from paceline.local.processes import child_environment
from paceline.services.rollout_gateway.rewards.processes import pipes

STOPPED = "the gateway's rewards have stopped"
REAP_S = 5.0
"""Longest wait for the end of a process that was killed."""


class ChildProcess:
    """Not reused: a restart makes another."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._requests = process.stdin
        self._answers = process.stdout
        self.loaded: set[str] = set()
        """What its user has made it load."""

    @classmethod
    async def start(
        cls, module: str, arguments: tuple[str, ...], deadline_s: float
    ) -> ChildProcess:
        """Spawn `python -m module` and wait until it serves.

        Raises ConfigError when it refuses its arguments, Unavailable, DeadlineExceeded.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=child_environment({"TMPDIR": str(process_directory())}),
                limit=pipes.MAX_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            raise Unavailable(f"a child process of the rewards cannot start: {error}") from error

        child = cls(process)
        answer = await child._exchange(b"", deadline_s)
        if isinstance(answer, pipes.Refused):
            await child.close()
            raise answer.error()
        return child

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether its end was seen."""
        return self._process.returncode is not None or self._requests.is_closing()

    async def ask(self, request: pipes.Request, deadline_s: float) -> pipes.Answer:
        """The answer to one request; one at a time.

        A child that does not answer in time (DeadlineExceeded), ends or garbles its answer
        (Unavailable), or whose caller is cancelled, is killed.
        """
        return await self._exchange(pipes.encode(request), deadline_s)

    async def close(self) -> None:
        """Kill it, with what it started, and wait for its end."""
        self._requests.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # A process that the kernel does not let go is not waited for.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REAP_S):
                await self._process.wait()

    async def _exchange(self, line: bytes, deadline_s: float) -> pipes.Answer:
        answered = False
        try:
            async with asyncio.timeout(deadline_s):
                self._requests.write(line)
                await self._requests.drain()
                answer = await pipes.receive(self._answers)
            answered = True
        except TimeoutError as error:
            raise DeadlineExceeded(
                "a child process of the rewards did not answer", seen=f"{deadline_s} s"
            ) from error
        except (OSError, asyncio.IncompleteReadError, DataLoss) as error:
            await self.close()
            code = self._process.returncode
            raise Unavailable(
                "a child process of the rewards was lost", seen=f"exit code {code}: {error}"
            ) from error
        finally:
            if not answered:
                await self.close()

        return answer


class ChildPlace:
    """Where one child lives after another; one caller at a time."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._child: ChildProcess | None = None
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process id of the child, if one lives."""
        return [self._child.pid] if self._child is not None and not self._child.ended else []

    @property
    def closed(self) -> bool:
        """Whether no child will be started any more."""
        return self._closed

    async def living(self, module: str, *arguments: str) -> ChildProcess:
        """The child, a new one if need be. Raises ConfigError or Unavailable."""
        if self._closed:
            raise Unavailable(STOPPED)
        if self._child is None or self._child.ended:
            try:
                self._child = await ChildProcess.start(module, arguments, self._start_s)
            except DeadlineExceeded as error:
                raise Unavailable(
                    "a child process of the rewards did not start in time", seen=error.seen
                ) from error
            if self._closed:
                await self._child.close()
                raise Unavailable(STOPPED)
        return self._child

    async def close(self) -> None:
        """End the child; none is started afterwards."""
        self._closed = True
        if self._child is not None:
            await self._child.close()
