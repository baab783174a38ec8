"""The children that score for rules which may block: users' own and the slow path of math_answer.

Owns their number, their replacement and whose fault a failure is. One request at a time per child;
more wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError, DeadlineExceeded, Unavailable
from paceline.local.patience import patient
from paceline.telemetry import get_logger
from rollout_gateway.environments.base import Episode
from rollout_gateway.rewards.base import Unscored
from rollout_gateway.rewards.processes.episode_json import episode_to
from rollout_gateway.rewards.processes.handle import ChildProcess, refusal

log = get_logger(__name__)

MODULE = "rollout_gateway.rewards.processes.main"
START_S = 60.0
"""Longest start of a child."""
LOAD_S = 120.0
"""Longest time in which a rule is imported and built."""
LIVES = 2
"""Children that one question may cost."""


class Children:
    """Up to `processes` children, each started when it is first needed."""

    def __init__(self, processes: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        # Last in, first out: one child serves as long as one is enough.
        self._free: asyncio.LifoQueue[_Place] = asyncio.LifoQueue()
        self._places = [_Place() for _ in range(processes)]
        for place in self._places:
            self._free.put_nowait(place)
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that live."""
        return [
            place.child.pid
            for place in self._places
            if place.child is not None and not place.child.ended
        ]

    async def load(self, path: str) -> None:
        """Have a child build a rule.

        Raises ConfigError when it cannot be built, Unavailable, DeadlineExceeded.
        """
        await self._ask(path, None)

    async def score(self, path: str, episode: Episode) -> float | None:
        """What the rule at an import path says; waits for a child as long as others' questions
        take.

        Raises Unscored when it raises or takes too long, ConfigError when it cannot be built,
        Unavailable when children cannot start or end by themselves, one after the other.
        """
        answer = await self._ask(path, {"score": path, "episode": episode_to(episode)})
        if "raised" in answer:
            raise Unscored("exception", answer["raised"])
        reward: float | None = answer["reward"]
        return reward

    async def close(self) -> None:
        """End all children; who waits for one gets Unavailable."""
        self._closed = True
        await asyncio.gather(
            *(place.child.close() for place in self._places if place.child is not None)
        )

    async def _ask(self, path: str, request: Mapping[str, Any] | None) -> dict[str, Any]:
        place = await self._free.get()
        try:
            for _ in range(LIVES - 1):
                try:
                    return await self._ask_once(place, path, request)
                except Unavailable as error:
                    if self._closed:
                        raise
                    log.warning("a child of the rewards is replaced", rule=path, error=str(error))
            return await self._ask_once(place, path, request)
        finally:
            self._free.put_nowait(place)

    async def _ask_once(
        self, place: _Place, path: str, request: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        child = await self._child(place)
        if path not in child.loaded:
            await _load(child, path)
            child.loaded.add(path)
        if request is None:
            return {}
        try:
            return await child.ask(request, self._deadline_s)
        except DeadlineExceeded as error:
            raise Unscored(
                "deadline", f"no answer in {self._deadline_s} s; its process was ended"
            ) from error

    async def _child(self, place: _Place) -> ChildProcess:
        """The child of a place, a new one if need be. Raises Unavailable."""
        if self._closed:
            raise Unavailable("the gateway's rewards have stopped")
        if place.child is None or place.child.ended:
            try:
                place.child = await ChildProcess.start(MODULE, (), patient(START_S))
            except DeadlineExceeded as error:
                raise Unavailable(f"a child of the rewards did not start: {error}") from error
            if self._closed:
                await place.child.close()
                raise Unavailable("the gateway's rewards have stopped")
        return place.child


class _Place:
    """Where one child lives after another."""

    child: ChildProcess | None = None


async def _load(child: ChildProcess, path: str) -> None:
    """Raises ConfigError; the child ends with it, so that the next one reads the mended file."""
    answer = await child.ask({"load": path}, patient(LOAD_S))
    if "loaded" in answer:
        return
    await child.close()
    if (refused := answer.get("refused")) is not None:
        raise refusal(refused)
    raise ConfigError(
        "a reward rule cannot be built", seen=f"{path}: {answer['raised']}"
    )  # e.g. SystemExit
