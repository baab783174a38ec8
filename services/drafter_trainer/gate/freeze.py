"""Decides when training stops to pay, and when a fall of acceptance needs quick judgements."""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from paceline.services.drafter_trainer.gate import comparison


@dataclass(frozen=True, slots=True)
class Baseline:
    """The serving drafter's mean acceptance length on the rows of the judgements that froze
    training.
    """

    length: float
    noise: float  # half-width of its 95 % interval
    policy_version: int


REMEMBERED = 20
"""Maximum number of kept judgements, since older judgements describe an earlier drafter."""
LOOKS = 2


class _Seen(NamedTuple):
    """Result of one judgement. Noise: half-widths of 95 % intervals."""

    gain: float
    gain_noise: float
    serving: float
    serving_noise: float


class Freeze:
    """Freezes when at least `after` judgements since the last promotion show that candidates gain
    at most a share `gain` of speed. The test uses the mean of the projected gains and its error:
    that of its parts or their spread, whichever is larger.

    Reopens when the serving drafter's length on a newer policy's rows is below its length at the
    freeze by more than the noise of both. It also reopens after LOOKS such measurements, and twice
    as many after each freeze without a promotion in between: one look cannot detect a slow decline.
    Half as many judgements then freeze it again. `after` 0 never freezes.
    """

    def __init__(self, after: int, gain: float) -> None:
        self._after, self._gain = after, gain
        self._patience, self._looks = LOOKS, 0
        self._seen: deque[_Seen] = deque(maxlen=max(after, REMEMBERED))
        self.baseline: Baseline | None = None

    @property
    def frozen(self) -> bool:
        """Whether training does not pay."""
        return self.baseline is not None

    def judged(
        self, judgement: comparison.Judgement, policy_version: int, *, promoted: bool
    ) -> bool:
        """Records a judgement; returns True if it froze training."""
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
        """Records the serving drafter's length on newer rows; returns True if it reopened
        training.
        """
        if self.baseline is None:
            return False
        self._looks += 1
        fallen = has_fallen((self.baseline.length, self.baseline.noise), (length, noise))
        if not fallen and self._looks < self._patience:
            return False
        self._patience *= 2
        kept = [] if fallen else list(self._seen)[len(self._seen) - self._after // 2 :]
        self.reopen()
        self._seen.extend(kept)
        return True

    def reopen(self) -> None:
        """Reopens training, because it pays again or after a rollback."""
        self.baseline = None
        self._looks = 0
        self._seen.clear()

    def state(self) -> dict[str, Any]:
        """The state for a later process."""
        return {
            "seen": list(self._seen),
            "patience": self._patience,
            "looks": self._looks,
            "baseline": asdict(self.baseline) if self.baseline else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores `state`."""
        self._seen.clear()
        self._seen.extend(_Seen(*one) for one in state["seen"])
        self._patience, self._looks = state["patience"], state["looks"]
        self.baseline = Baseline(**state["baseline"]) if state["baseline"] else None


def _bound(gains: Sequence[float], noises: Sequence[float]) -> float:
    """Distance of a lower 95 % bound below the mean gain."""
    measured = math.hypot(*noises) / comparison.TWO_SIDED
    differ = statistics.stdev(gains) * math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return comparison.ONE_SIDED * max(measured, differ) / len(gains)


FALLEN = 0.8
"""Tokens per drafted round fall if they are below this share of the earlier tokens. Ordinary
differences between the tasks and arms of steps are smaller.
"""
HURRIED = 8
"""Judgements after a fall that do not wait for optimiser steps."""


def has_fallen(before: tuple[float, float], now: tuple[float, float]) -> bool:
    """Whether a length is below an earlier one by more than the noise of both. Both are (length,
    half-width of its 95 % interval); an earlier length of NaN is unknown.
    """
    return before[0] - now[0] > math.hypot(before[1], now[1])


class Hurry:
    """After a fall of acceptance in rollouts, candidates are judged by the rows of each policy
    version. A slightly better candidate is then worth its promotion, and a judgement every few
    dozen optimiser steps is too late.
    """

    def __init__(self) -> None:
        self._lengths: Mapping[str, float] = {}
        self._left = 0
        self._judged_policy = -1

    def rolled_out(self, lengths: Mapping[str, float]) -> None:
        """Records the tokens per drafted round by arm of the last rollouts."""
        both = self._lengths.keys() & lengths.keys()
        ratios = [lengths[arm] / self._lengths[arm] for arm in both]
        if ratios and statistics.geometric_mean(ratios) < FALLEN:
            self._left = HURRIED
        self._lengths = lengths or self._lengths

    @property
    def lasts(self) -> bool:
        """Whether judgements may come early."""
        return self._left > 0

    def due(self, policy_version: int) -> bool:
        """Whether rows of this policy version should be judged now."""
        return self.lasts and policy_version > self._judged_policy

    def begun(self, policy_version: int) -> None:
        """Records the start of a judgement by rows of that version."""
        self._judged_policy = policy_version

    def judged(self) -> bool:
        """Records the end of a judgement; returns whether it was an early one."""
        lasted = self.lasts
        self._left = max(self._left - 1, 0)
        return lasted
