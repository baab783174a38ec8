"""The commands and news that ranks of every trainer know."""

from __future__ import annotations

from dataclasses import dataclass

from paceline import errors
from paceline.errors import InternalError, PacelineError


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint now; answered by Saved."""

    command_id: int = 0


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint lies on disk."""

    command_id: int  # 0: it was due
    path: str
    version: int  # of the policy; of the drafter the optimiser steps


@dataclass(frozen=True, slots=True)
class Impaired:
    """Something is damaged that the ranks can do without; for the supervisor's console."""

    what: str


@dataclass(frozen=True, slots=True)
class Doing:
    """What the ranks do from now on, and whom that waits for; for whoever asks for progress."""

    what: str
    waits_for: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """A command failed; the ranks take the next one."""

    command_id: int
    error_class: str  # in paceline.errors
    message: str
    reason: str

    @classmethod
    def of(cls, command_id: int, error: PacelineError) -> Failed:
        """An error as news."""
        return cls(command_id, type(error).__name__, str(error), error.reason)

    def error(self) -> PacelineError:
        """The error to raise in the parent."""
        found = getattr(errors, self.error_class, InternalError)
        return found(self.message, reason=self.reason)
