"""Assigns closed groups to steps of open traffic that collect at the same time. The earliest step
gets the next group, since the learner wants its steps in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from paceline.services.rollout_gateway.sessions.open_groups import OpenGroup, OpenGroups


class StepTurns:
    """The steps that collect groups. Use on one event loop."""

    def __init__(self, groups: OpenGroups) -> None:
        self.groups = groups
        self._wanting: set[int] = set()
        self._left = asyncio.Event()

    @asynccontextmanager
    async def taken(self, step: int) -> AsyncIterator[CollectingStep]:
        """Inside the block the step collects groups."""
        self._wanting.add(step)
        try:
            yield CollectingStep(self, step)
        finally:
            self._wanting.discard(step)
            self._left.set()

    def earliest(self, step: int) -> bool:
        """Whether no earlier step collects."""
        return step == min(self._wanting)

    async def somebody_left(self) -> None:
        """Return once a step has stopped collecting."""
        self._left.clear()
        await self._left.wait()


@dataclass(frozen=True)
class CollectingStep:
    """One collecting step."""

    turns: StepTurns
    step: int

    async def comes(self) -> None:
        """Return once `pop` has a group."""
        while True:
            await self.turns.groups.closed()
            if self.turns.earliest(self.step):
                return
            await self.turns.somebody_left()

    def pop(self) -> OpenGroup | None:
        """The group that closed first; None when no group is closed, or an earlier step
        collects.
        """
        return self.turns.groups.pop() if self.turns.earliest(self.step) else None
