"""Holds what a group of ranks is to be made into between two commands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paceline.errors import PacelineError


class GroupChange:
    """A group that ends, is changed by `make` and starts again; undone where that start fails."""

    def __init__(self, make: Callable[[], None], undo: Callable[[], None]) -> None:
        self._make, self._undo = make, undo
        self._made = False
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the group has started, or with why it could not."""

    def make(self) -> None:
        """To be called while no rank runs."""
        self._make()
        self._made = True

    def end(self, failure: PacelineError | None) -> None:
        """Answers whoever waits; for a failure after the change has been undone."""
        if failure is not None and self._made:
            self._undo()
        if self.over.done():  # nobody waits any more
            return
        if failure is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(failure)
