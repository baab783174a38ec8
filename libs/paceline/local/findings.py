"""Defines the results of `paceline doctor`: one finding per check of the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from paceline.errors import PacelineError

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str  # subject of the check
    verdict: Verdict  # fail: a run would not start, or soon fail
    seen: str
    advice: str = ""  # recommended action; "" if all is well

    @classmethod
    def of_error(cls, check: str, error: PacelineError, verdict: Verdict = "fail") -> Finding:
        """A finding from an error; the allowed values become the advice."""
        seen = error.message if error.seen is None else f"{error.message}: {error.seen}"
        return cls(check, verdict, seen, error.allowed or "")


def looked_at(check: str, look: Callable[[], str]) -> Finding:
    """A finding from a check function: its text, or the error that it raised."""
    try:
        return Finding(check, "ok", look())
    except PacelineError as error:
        return Finding.of_error(check, error)
