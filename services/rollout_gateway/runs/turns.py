"""Steps of open traffic that collect groups at the same time. Owns whose the next group is: the
earliest step's, since the learner wants its steps in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from paceline.services.rollout_gateway.sessions.open_groups import OpenGroup, OpenGroups


class StepTurns:
    """Use on one event loop."""

    def __init__(self, groups: OpenGroups) -> None:
        self.groups = groups
        self._wanting: set[int] = set()
        self._left = asyncio.Event()

    @asynccontextmanager
    async def taken(self, step: int) -> AsyncIterator[CollectingStep]:
        """Inside the block the step wants groups."""
        self._wanting.add(step)
        try:
            yield CollectingStep(self, step)
        finally:
            self._wanting.discard(step)
            self._left.set()

    def earliest(self, step: int) -> bool:
        """Whether no earlier step wants a group."""
        return step == min(self._wanting)

    async def somebody_left(self) -> None:
        """Returns once a step has what it wants."""
        self._left.clear()
        await self._left.wait()


@dataclass(frozen=True)
class CollectingStep:
    """A step's place among those that collect."""

    turns: StepTurns
    step: int

    async def comes(self) -> None:
        """Returns once there is a group for `pop`."""
        while True:
            await self.turns.groups.closed()
            if self.turns.earliest(self.step):
                return
            await self.turns.somebody_left()

    def pop(self) -> OpenGroup | None:
        """The group that closed first; None when there is none now, or it is an earlier step's."""
        return self.turns.groups.pop() if self.turns.earliest(self.step) else None
