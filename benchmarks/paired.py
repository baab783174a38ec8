"""Ratios of paired measurements. Owns the statistics; not what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.errors import InvalidInput

RESAMPLES = 4000
RESOLVED_WITHIN = 0.05


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the pairs' ratios and its bootstrap 95 % interval."""

    value: float
    low: float
    high: float
    pairs: int

    @property
    def resolved(self) -> bool:
        """The interval lies within 5 % of the ratio."""
        return self.low >= self.value * (1 - RESOLVED_WITHIN) and self.high <= self.value * (
            1 + RESOLVED_WITHIN
        )

    def __str__(self) -> str:
        return (
            f"{self.value:.3f} [{self.low:.3f}, "
            f"{self.high:.3f}]{'' if self.resolved else ' unresolved'}"
        )


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Ratio:
    """Median of ours[i] / theirs[i]; the interval is the percentile bootstrap over pairs (Efron
    1979).

    Raises InvalidInput for unequal or empty sequences and for numbers that are not positive.
    """
    if len(ours) != len(theirs) or not ours:
        raise InvalidInput(
            "paired measurements come in pairs",
            seen=(len(ours), len(theirs)),
            allowed="equal, >= 1",
        )
    if (least := min(*ours, *theirs)) <= 0:
        raise InvalidInput("measurements are positive", seen=least, allowed="> 0")
    ratios = np.asarray(ours, dtype=np.float64) / np.asarray(theirs, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    medians = np.median(ratios[draws], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))
