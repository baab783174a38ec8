"""Collects the events of a run, so that a waiter misses none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Happening:
    """One observed event."""

    at_s: float  # of time.monotonic
    what: str  # a Trigger, or "console"
    detail: str = ""
    step: int = -1  # the RL step of a fact


class Happenings:
    """All observed events, in order."""

    def __init__(self) -> None:
        self._seen: list[Happening] = []
        self._more = asyncio.Event()

    def tell(self, what: str, detail: str = "", step: int = -1) -> None:
        """Records an event at the present time."""
        self._seen.append(Happening(time.monotonic(), what, detail, step))
        self._more.set()
        self._more = asyncio.Event()

    def since(self, at_s: float) -> list[Happening]:
        """Events observed at `at_s` or later."""
        first = len(self._seen)
        while first and self._seen[first - 1].at_s >= at_s:
            first -= 1
        return self._seen[first:]

    async def first(
        self, matches: Callable[[Happening], bool], at_s: float, deadline_s: float, what: str
    ) -> Happening:
        """Waits for the first matching event at `at_s` or later. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    more = self._more
                    for one in self.since(at_s):
                        if matches(one):
                            return one
                    await more.wait()
        except TimeoutError as error:
            last = [f"{one.what} {one.detail}" for one in self._seen[-5:]]
            raise DeadlineExceeded(f"{what} never came", seen=last, allowed=deadline_s) from error
