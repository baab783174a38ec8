"""A place for one child process that scores: starts it, sends requests, ends and replaces it."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from typing import TypeVar

from paceline.errors import DataLoss, DeadlineExceeded, Unavailable
from paceline.local.child import Child
from paceline.local.process_directory import process_directory
from paceline.services.rollout_gateway.rewards.processes import pipes
from paceline.telemetry import get_logger

STOPPED = "the gateway's rewards have stopped"
LOST = "a child process of the rewards was lost"
T = TypeVar("T")
log = get_logger(__name__)


class ChildPlace:
    """Has at most one child, which answers one request at a time."""

    def __init__(self, module: str, arguments: tuple[str, ...], start_s: float) -> None:
        """The child runs `python -m module` with the arguments. `start_s`: deadline of its
        start.
        """
        self._command = (sys.executable, "-m", module, *arguments)
        self._start_s = start_s
        self._child: Child | None = None
        self._turn = asyncio.Lock()
        self.loaded: set[str] = set()
        """Rules that the child has loaded."""
        self.closed = False

    @property
    def pids(self) -> list[int]:
        """Process id of the child, if one lives."""
        return [self._child.pid] if self._child is not None and not self._child.ended.done() else []

    async def with_child(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work` with a child that runs; a child that dies over it is replaced once.

        Raises the errors of `work`, ConfigError when the child refuses its arguments, Unavailable.
        """
        async with self._turn:
            try:
                await self._start()
                return await work()
            except Unavailable as error:
                if self.closed:
                    raise
                log.warning("a child of the rewards is replaced", error=str(error))
            await self._start()
            return await work()

    async def ask(self, request: pipes.Request, deadline_s: float) -> pipes.Answer:
        """The answer to one request, inside `with_child`.

        The child is killed when it does not answer in time (DeadlineExceeded). It is also killed
        when it ends or sends an invalid answer (Unavailable), and when its caller is cancelled.
        """
        return await self._exchange(pipes.encode(request), deadline_s)

    async def end_child(self) -> None:
        """Kill the child and its process group, and wait for its end."""
        if self._child is not None:
            await self._child.stop()

    async def close(self) -> None:
        """End the child and start no more."""
        self.closed = True
        await self.end_child()

    async def _start(self) -> None:
        if self.pids and not self.closed:
            return
        self.loaded.clear()
        try:
            if not self.closed:
                self._child = await Child.execute(
                    *self._command,
                    environment={"TMPDIR": str(process_directory())},
                    stdin=PIPE,
                    stdout=PIPE,
                    limit=pipes.MAX_BYTES,
                )
            if self.closed:
                await self.end_child()
                raise Unavailable(STOPPED)
            answer = await self._exchange(b"", self._start_s)
        except OSError as error:
            raise Unavailable(f"a child process of the rewards cannot start: {error}") from error
        except DeadlineExceeded as error:
            message = "a child process of the rewards did not start in time"
            raise Unavailable(message, seen=error.seen) from error
        if isinstance(answer, pipes.Refused):
            await self.end_child()
            raise answer.error()

    async def _exchange(self, line: bytes, deadline_s: float) -> pipes.Answer:
        """Send a line, none when empty, and return the answer of the next line."""
        assert self._child is not None
        child, program = self._child, self._child.program
        assert program.stdin is not None
        assert program.stdout is not None
        answer: pipes.Answer | None = None
        try:
            async with asyncio.timeout(deadline_s):
                program.stdin.write(line)
                await program.stdin.drain()
                answer = pipes.ANSWERS.decode(await pipes.receive(program.stdout))
            return answer
        except TimeoutError as error:
            message = "a child process of the rewards did not answer"
            raise DeadlineExceeded(message, seen=f"{deadline_s} s") from error
        except (OSError, asyncio.IncompleteReadError, DataLoss) as error:
            await child.stop()
            raise Unavailable(LOST, seen=f"exit code {child.returncode}: {error}") from error
        finally:
            if answer is None:
                await child.stop()
