"""Is the candidate better than the serving drafter, beyond noise? Pure arithmetic over counts; owns no model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Judgement:
    """Outcome of one comparison; lengths count the bonus token (>= 1)."""

    candidate: float
    serving: float
    noise: float  # half-width of the 95 % interval of the paired difference
    positions: int

    @property
    def promoted(self) -> bool:
        """Better by more than the noise."""
        return self.candidate - self.serving > self.noise


def accepted_tokens(matches: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """[N, K] whether draft k equalled the target's draw -> [N] drafts accepted before the first miss."""
    return np.cumprod(matches, axis=1, dtype=np.int64).sum(axis=1)


def judge(
    candidate: npt.NDArray[np.int64],
    serving: npt.NDArray[np.int64],
    documents: npt.NDArray[np.int64],
    *,
    resamples: int,
    seed: int = 0,
) -> Judgement:
    """Survival acceptance length E[len] = 1 + sum_i P(drafts 1..i all accepted), compared position by position.

    `candidate` and `serving` [N] are accepted drafts at the same held-out positions, `documents` [N] the sequence each
    position belongs to. Positions of one sequence depend on each other, so whole sequences are resampled (paired
    bootstrap; Efron & Tibshirani 1993, chapter 8).
    """
    _, index = np.unique(documents, return_inverse=True)
    sizes = np.bincount(index).astype(np.float64)
    difference = np.bincount(index, weights=(candidate - serving).astype(np.float64))
    draws = np.random.default_rng(seed).integers(0, len(sizes), size=(resamples, len(sizes)))
    means = difference[draws].sum(axis=1) / sizes[draws].sum(axis=1)
    # One sequence says nothing about how sequences differ.
    noise = 1.96 * float(means.std()) if len(sizes) > 1 else math.inf
    return Judgement(
        candidate=1.0 + float(candidate.mean()),
        serving=1.0 + float(serving.mean()),
        noise=noise,
        positions=len(candidate),
    )
