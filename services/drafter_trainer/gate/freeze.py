"""Decides when training no longer pays, and when it does again. Pure arithmetic."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from paceline.services.drafter_trainer.gate.comparison import Judgement


@dataclass(frozen=True, slots=True)
class Baseline:
    """The serving drafter's acceptance length on fresh rows when training was frozen."""

    length: float
    noise: float  # half-width of its 95 % interval
    policy_version: int


class Freeze:
    """Frozen after `after` judgements in a row that promoted nothing and promised at most a share
    `gain` of speed.

    Reopened when the serving drafter's length on a newer policy's rows is below that at the freeze
    by more than the noise of both measurements together. `after` 0 never freezes.
    """

    def __init__(self, after: int, gain: float) -> None:
        self._after, self._gain = after, gain
        self._gains: deque[float] = deque(maxlen=max(after, 1))
        self.baseline: Baseline | None = None

    @property
    def frozen(self) -> bool:
        """Training does not pay."""
        return self.baseline is not None

    def judged(self, judgement: Judgement, policy_version: int, *, promoted: bool) -> bool:
        """Takes a judgement in; True when it froze training."""
        if promoted:
            self._gains.clear()
            return False
        self._gains.append(judgement.gain)
        if not self._after or len(self._gains) < self._after or max(self._gains) > self._gain:
            return False
        self.baseline = Baseline(judgement.serving, judgement.serving_noise, policy_version)
        return True

    def measured(self, length: float, noise: float) -> bool:
        """Takes the serving drafter's length on newer rows in; True when it reopened training."""
        if self.baseline is None or self.baseline.length - length <= math.hypot(
            self.baseline.noise, noise
        ):
            return False
        self.reopen()
        return True

    def reopen(self) -> None:
        """Training pays again, or nothing is known of it."""
        self.baseline = None
        self._gains.clear()

    def state(self) -> dict[str, Any]:
        """What a later process needs."""
        return {
            "gains": list(self._gains),
            "baseline": asdict(self.baseline) if self.baseline else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from `state`."""
        self._gains.clear()
        self._gains.extend(state["gains"])
        self.baseline = Baseline(**state["baseline"]) if state["baseline"] else None
