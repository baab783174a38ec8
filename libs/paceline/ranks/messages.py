"""Messages between a trainer and its ranks, and the progress that ranks report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline import errors
from paceline.errors import InternalError, PacelineError


@dataclass(frozen=True, slots=True)
class Save:
    """Command: write a checkpoint now. The reply is Saved."""

    command_id: int = 0


@dataclass(frozen=True, slots=True)
class Saved:
    """Report: a checkpoint is on disk."""

    command_id: int  # 0: a scheduled checkpoint
    path: str
    version: int  # policy: its version; drafter: its optimiser steps


@dataclass(frozen=True, slots=True)
class Impaired:
    """Report: a fault that the ranks can tolerate, for the supervisor's console."""

    what: str


@dataclass(frozen=True, slots=True)
class Doing:
    """Report: the current work of the ranks and its blocker, for progress queries."""

    what: str
    waits_for: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """Report: a command failed; the ranks accept the next command."""

    command_id: int
    error_class: str  # class name in paceline.errors
    message: str
    reason: str

    @classmethod
    def of(cls, command_id: int, error: PacelineError) -> Failed:
        """A report of this error."""
        return cls(command_id, type(error).__name__, str(error), error.reason)

    def error(self) -> PacelineError:
        """The error, for the parent to raise."""
        found = getattr(errors, self.error_class, InternalError)
        return found(self.message, reason=self.reason)


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
