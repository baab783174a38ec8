"""Runs reward rules in child processes: starts, restarts and ends them, one or a pool.

A child runs one request at a time; further requests wait. Maps failures to the responsible party:
rule, settings or infrastructure.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from paceline.errors import ConfigError, DataLoss, DeadlineExceeded, Unavailable
from paceline.local import patience, user_directory
from paceline.local.child import Child
from paceline.services.rollout_gateway.environments import Episode
from paceline.services.rollout_gateway.rewards import Unscored, pipes
from paceline.services.rollout_gateway.rewards.pipes import (
    Answer,
    Done,
    Load,
    Raised,
    Refused,
    Rewards,
    ScoreEpisodes,
)
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
                    environment={"TMPDIR": str(user_directory.process_directory())},
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


MODULE = "paceline.services.rollout_gateway.rewards.own_rules"
START_S = 60.0
"""Maximum seconds to start a child."""
LOAD_S = 120.0
"""Maximum seconds to import and build a rule."""


class Children:
    """Up to `count` children, each started on first use."""

    def __init__(self, count: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        # Last in, first out: a single child serves as long as it suffices.
        self._free: asyncio.LifoQueue[ChildPlace] = asyncio.LifoQueue()
        self._places = [ChildPlace(MODULE, (), patience.patient(START_S)) for _ in range(count)]
        for place in self._places:
            self._free.put_nowait(place)

    @property
    def pids(self) -> list[int]:
        """Process ids of the live children."""
        return [pid for place in self._places for pid in place.pids]

    async def load(self, path: str) -> None:
        """Have a child build a rule.

        Raises ConfigError when it cannot be built, Unavailable, DeadlineExceeded.
        """
        await self._ask(path)

    async def score(self, path: str, episode: Episode) -> float | None:
        """The score of the rule at an import path; waits for a free child.

        Raises Unscored when the rule raises or takes too long, and ConfigError when it cannot be
        built. Raises Unavailable when one child after the other fails to start or dies.
        """
        answer = await self._ask(path, ScoreEpisodes(path, (episode,)))
        if isinstance(answer, Rewards) and not isinstance(reward := answer.values[0], Raised):
            return reward
        raise Unscored("exception", answer.text if isinstance(answer, Raised) else str(answer))

    async def close(self) -> None:
        """End all children; waiting callers get Unavailable."""
        await asyncio.gather(*(place.close() for place in self._places))

    async def _ask(self, path: str, request: ScoreEpisodes | None = None) -> Answer:
        place = await self._free.get()
        try:
            return await place.with_child(partial(self._ask_child, place, path, request))
        finally:
            self._free.put_nowait(place)

    async def _ask_child(
        self, place: ChildPlace, path: str, request: ScoreEpisodes | None
    ) -> Answer:
        if path not in place.loaded:
            answer = await place.ask(Load(path), patience.patient(LOAD_S))
            if not isinstance(answer, Done):
                await place.end_child()  # the next child reads a corrected file
                if isinstance(answer, Refused):
                    raise answer.error()
                seen = f"{path}: {answer}"  # e.g. SystemExit
                raise ConfigError("a reward rule cannot be built", seen=seen)
            place.loaded.add(path)
        if request is None:
            return Done()
        try:
            return await place.ask(request, self._deadline_s)
        except DeadlineExceeded as error:
            raise Unscored(
                "deadline", f"no answer in {self._deadline_s} s; its process was ended"
            ) from error


class ChildRule:
    """The rule at an import path, run in a child."""

    def __init__(self, path: str, children: Children) -> None:
        self._path = path
        self._children = children

    async def prepare(self) -> None:
        """Raises ConfigError when the rule cannot be built, Unavailable, DeadlineExceeded."""
        await self._children.load(self._path)

    async def score(self, episode: Episode) -> float | None:
        """Raises Unscored, ConfigError or Unavailable, see Children.score."""
        return await self._children.score(self._path, episode)
