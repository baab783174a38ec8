"""Reports what a rank does and that it gets on, at most once in a while."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.ranks.messages import Doing

REPORT_S = 1.0
"""Seconds between two reports of the same work."""


class ProgressReport:
    """One rank's; `send` carries a report to the parent."""

    def __init__(self, send: Callable[[Doing], None]) -> None:
        self._send = send
        self._doing = ""
        self._due_s = 0.0  # time.monotonic()

    def begins(self, doing: str) -> None:
        """The rank does something else from now on; reported at once."""
        self._due_s = 0.0
        self.goes_on(doing)

    def goes_on(self, doing: str = "") -> None:
        """The rank gets on with what it does, `doing` in other words; reported when it is due."""
        self._doing = doing or self._doing
        if self._doing and time.monotonic() >= self._due_s:
            self._send(Doing(self._doing))
            self._due_s = time.monotonic() + REPORT_S
