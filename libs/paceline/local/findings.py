"""The nouns of `paceline doctor`: what one check of the machine has found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from paceline.errors import PacelineError

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line."""

    check: str  # what was looked at
    verdict: Verdict  # fail: a run would not start, or not live long
    seen: str
    advice: str = ""  # what to do; "" where all is well

    @classmethod
    def of_error(cls, check: str, error: PacelineError, verdict: Verdict = "fail") -> Finding:
        """An error, with what it allows as the advice."""
        seen = error.message if error.seen is None else f"{error.message}: {error.seen}"
        return cls(check, verdict, seen, error.allowed or "")


def looked_at(check: str, look: Callable[[], str]) -> Finding:
    """What `look` saw, or the error that it raised."""
    try:
        return Finding(check, "ok", look())
    except PacelineError as error:
        return Finding.of_error(check, error)
