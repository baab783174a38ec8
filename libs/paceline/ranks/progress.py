"""Reports a rank's current work and its progress, at a limited rate."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.ranks.messages import Doing

REPORT_S = 1.0
"""Minimum seconds between two reports of the same work."""


class ProgressReport:
    """The reporter of one rank; `send` delivers a report to the parent."""

    def __init__(self, send: Callable[[Doing], None]) -> None:
        self._send = send
        self._doing = ""
        self._due_s = 0.0  # time.monotonic()

    def begins(self, doing: str) -> None:
        """Starts new work and reports it at once."""
        self._due_s = 0.0
        self.goes_on(doing)

    def goes_on(self, doing: str = "") -> None:
        """Notes progress, optionally with new text `doing`, and reports it when a report is due."""
        self._doing = doing or self._doing
        if self._doing and time.monotonic() >= self._due_s:
            self._send(Doing(self._doing))
            self._due_s = time.monotonic() + REPORT_S
