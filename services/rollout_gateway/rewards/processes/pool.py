"""Pool of children for rules that may block: users' own rules and the slow path of math_answer.

A child runs one request at a time; further requests wait. Maps failures to the responsible party:
rule, settings or infrastructure.
"""

from __future__ import annotations

import asyncio
from functools import partial

from paceline.errors import ConfigError, DeadlineExceeded
from paceline.local.patience import patient
from paceline.services.rollout_gateway.environments.base import Episode
from paceline.services.rollout_gateway.rewards.base import Unscored
from paceline.services.rollout_gateway.rewards.processes.child import ChildPlace
from paceline.services.rollout_gateway.rewards.processes.pipes import (
    Answer,
    Done,
    Load,
    Raised,
    Refused,
    Rewards,
    ScoreEpisodes,
)

MODULE = "paceline.services.rollout_gateway.rewards.processes.own_rules"
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
        self._places = [ChildPlace(MODULE, (), patient(START_S)) for _ in range(count)]
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
            answer = await place.ask(Load(path), patient(LOAD_S))
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
