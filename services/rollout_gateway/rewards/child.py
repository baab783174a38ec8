"""Runs reward rules in child processes: starts, restarts and ends them, one or a pool.

A child runs one request at a time; further requests wait. Maps failures to the responsible party:
rule, settings or infrastructure.
"""

import asyncio
import sys
from dataclasses import dataclass

from paceline.errors import ConfigError, DataLoss, DeadlineExceeded, Unavailable
from paceline.local import patience, user_directory
from paceline.local.child import Child
from paceline.services.rollout_gateway.environments import Episode
from paceline.services.rollout_gateway.rewards import RewardRule, Unscored, child_program
from paceline.services.rollout_gateway.rewards.child_program import Raised, RuleRequest, Scored
from paceline.telemetry import get_logger

STOPPED = "the gateway's rewards have stopped"
LOAD_S = 180.0
"""Maximum seconds to start a child, and to import and build its rule."""
_START = f"from {child_program.__name__} import main; main()"
log = get_logger(__name__)


class ChildPlace:
    """Has at most one child, which answers one request at a time."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._turn = asyncio.Lock()
        self._loaded: set[str] = set()  # rules of the child
        self.closed = False

    async def score(
        self, path: str, episode: Episode | None = None, deadline_s: float = 0.0
    ) -> Scored | Raised:
        """The answer of the rule at an import path, which the child loads first; without an episode
        the rule is only loaded.

        A child that dies is replaced once. A child that does not answer in time, sends an invalid
        answer or loses its caller is killed. Raises ConfigError when the rule cannot be built,
        DeadlineExceeded when it does not load in time, Unscored when it does not score in time,
        Unavailable.
        """
        async with self._turn:
            try:
                return await self._score(path, episode, deadline_s)
            except Unavailable as error:
                if self.closed:
                    raise
                log.warning("a child of the rewards is replaced", error=str(error))
            return await self._score(path, episode, deadline_s)

    async def close(self) -> None:
        """End the child and its process group, and start no more."""
        self.closed = True
        if self._child is not None:
            await self._child.stop()

    async def _score(
        self, path: str, episode: Episode | None, deadline_s: float
    ) -> Scored | Raised:
        child = await self._running()
        if path not in self._loaded:
            await _ask(child, RuleRequest(path), patience.patient(LOAD_S))
            self._loaded.add(path)
        if episode is None:
            return Scored()
        try:
            return await _ask(child, RuleRequest(path, episode), deadline_s)
        except DeadlineExceeded as error:
            message = f"no answer in {deadline_s} s; its process was ended"
            raise Unscored("deadline", message) from error

    async def _running(self) -> Child:
        """The child that lives, or a new one. Raises Unavailable."""
        if not self.closed and (self._child is None or self._child.ended.done()):
            self._loaded.clear()
            try:
                place = {"TMPDIR": str(user_directory.process_directory())}
                self._child = await Child.piped(sys.executable, "-c", _START, environment=place)
            except OSError as error:
                message = f"a child process of the rewards cannot start: {error}"
                raise Unavailable(message) from error
        if self._child is None or self.closed:
            await self.close()  # also a child that started meanwhile
            raise Unavailable(STOPPED)
        return self._child


async def _ask(child: Child, request: RuleRequest, deadline_s: float) -> Scored | Raised:
    try:
        line = await child.ask(child_program.encode(request), deadline_s)
        answer = child_program.ANSWERS.decode(line)
    except TimeoutError as error:
        message = "a child process of the rewards did not answer"
        raise DeadlineExceeded(message, seen=f"{deadline_s} s") from error
    except (OSError, DataLoss) as error:
        await child.stop()
        seen = f"exit code {child.returncode}: {error}"
        raise Unavailable("a child process of the rewards was lost", seen=seen) from error
    if isinstance(answer, child_program.Refused):
        await child.stop()  # the next child reads a corrected file
        raise ConfigError(answer.message, seen=answer.seen, allowed=answer.allowed)
    return answer


class Children:
    """Up to `count` children, each started on first use."""

    def __init__(self, count: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        # Last in, first out: a single child serves as long as it suffices.
        self._free: asyncio.LifoQueue[ChildPlace] = asyncio.LifoQueue()
        self._places = [ChildPlace() for _ in range(count)]
        for place in self._places:
            self._free.put_nowait(place)

    async def score(self, path: str, episode: Episode | None = None) -> float | None:
        """The score of the rule at an import path for one episode; without an episode the rule is
        only loaded. Waits for a free child.

        Raises Unscored when the rule raises or takes too long, and the errors of ChildPlace.score.
        """
        place = await self._free.get()
        try:
            answer = await place.score(path, episode, self._deadline_s)
        finally:
            self._free.put_nowait(place)
        if isinstance(answer, Raised):
            raise Unscored("exception", answer.text)
        return answer.value

    async def close(self) -> None:
        """End all children; waiting callers get Unavailable."""
        await asyncio.gather(*(place.close() for place in self._places))


@dataclass(frozen=True, slots=True)
class ChildRule(RewardRule):
    """The rule at an import path, run in a child. Its methods raise the errors of
    Children.score.
    """

    _path: str
    _children: Children

    async def prepare(self) -> None:
        """Load the rule."""
        await self._children.score(self._path)

    async def score(self, episode: Episode) -> float | None:
        """The rule's score."""
        return await self._children.score(self._path, episode)
