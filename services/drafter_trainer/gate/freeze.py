"""Decides when training no longer pays, and when it does again. Pure arithmetic."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from paceline.services.drafter_trainer.gate.comparison import (
    ONE_SIDED,
    TWO_SIDED,
    Judgement,
)


@dataclass(frozen=True, slots=True)
class Baseline:
    """The serving drafter's mean acceptance length on the rows of the judgements that froze
    training.
    """

    length: float
    noise: float  # half-width of its 95 % interval
    policy_version: int


REMEMBERED = 20
"""Judgements at most; a drafter that learns has left older ones behind."""
LOOKS = 2


class _Seen(NamedTuple):
    """What one judgement found. Noise: half-widths of 95 % intervals."""

    gain: float
    gain_noise: float
    serving: float
    serving_noise: float


class Freeze:
    """Frozen when the judgements since the last promotion, `after` at least, say that candidates
    are worth at most a share `gain` of speed: the mean of what they promised, and its error, which
    is that of its parts or what those differ by, whichever is larger.

    Reopened when the serving drafter's length on a newer policy's rows is below that at the freeze
    by more than the noise of both measurements together; and after LOOKS of them in any case, after
    twice as many with each freeze that no promotion has followed: a drafter falls behind by less at
    a time than one look can tell. In that case half as many judgements freeze it again. `after` 0
    never freezes.
    """

    def __init__(self, after: int, gain: float) -> None:
        self._after, self._gain = after, gain
        self._patience, self._looks = LOOKS, 0
        self._seen: deque[_Seen] = deque(maxlen=max(after, REMEMBERED))
        self.baseline: Baseline | None = None

    @property
    def frozen(self) -> bool:
        """Training does not pay."""
        return self.baseline is not None

    def judged(self, judgement: Judgement, policy_version: int, *, promoted: bool) -> bool:
        """Takes a judgement in; True when it froze training."""
        if promoted:
            self._seen.clear()
            self._patience = LOOKS
            return False
        self._seen.append(_Seen(*(getattr(judgement, name) for name in _Seen._fields)))
        if not self._after or len(self._seen) < self._after:
            return False
        gains, gain_noises, lengths, length_noises = zip(*self._seen, strict=True)
        if statistics.fmean(gains) + _bound(gains, gain_noises) > self._gain:
            return False
        noise = math.hypot(*length_noises) / len(lengths)
        self.baseline = Baseline(statistics.fmean(lengths), noise, policy_version)
        return True

    def measured(self, length: float, noise: float) -> bool:
        """Takes the serving drafter's length on newer rows in; True when it reopened training."""
        if self.baseline is None:
            return False
        self._looks += 1
        fallen = self.baseline.length - length > math.hypot(self.baseline.noise, noise)
        if not fallen and self._looks < self._patience:
            return False
        self._patience *= 2
        kept = [] if fallen else list(self._seen)[len(self._seen) - self._after // 2 :]
        self.reopen()
        self._seen.extend(kept)
        return True

    def reopen(self) -> None:
        """Training pays again, or nothing is known of it."""
        self.baseline = None
        self._looks = 0
        self._seen.clear()

    def state(self) -> dict[str, Any]:
        """What a later process needs."""
        return {
            "seen": list(self._seen),
            "patience": self._patience,
            "looks": self._looks,
            "baseline": asdict(self.baseline) if self.baseline else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from `state`."""
        self._seen.clear()
        self._seen.extend(_Seen(*one) for one in state["seen"])
        self._patience, self._looks = state["patience"], state["looks"]
        self.baseline = Baseline(**state["baseline"]) if state["baseline"] else None


def _bound(gains: Sequence[float], noises: Sequence[float]) -> float:
    """How much their mean may lie below what it stands for, at 95 %."""
    measured = math.hypot(*noises) / TWO_SIDED
    differ = statistics.stdev(gains) * math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return ONE_SIDED * max(measured, differ) / len(gains)
