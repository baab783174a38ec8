"""Corrects for tokens drawn by another policy, as pure functions.

The sampler's policy mu differs from pi, the policy at the step's start, if its weights are older or
its numbers are rounded; rho_t = pi(t) / mu(t).

Shape letters: M trained tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from paceline.services.policy_trainer.algorithm_settings import CorrectionConfig
from paceline.services.policy_trainer.algorithms.losses import (
    bounded_ratio,
    sequence_means,
    sequence_sums,
)

CAPS = {"token": 2.0, "sequence": 5.0}
BANDS = {"band": (0.5, 5.0), "geometric": (0.99, 1.01)}


def correction_weights(
    settings: CorrectionConfig,
    proximal_logprobs: Float[Tensor, " M"],
    behavior_logprobs: Float[Tensor, " M"],
    sequences: Int[Tensor, " M"],
) -> tuple[Float[Tensor, " M"], Bool[Tensor, " M"]]:
    """Weight of each token's loss, without gradient, and a mask of the kept tokens.

    The weight is truncated importance sampling (Ionides 2008): min(rho_t, cap), or the truncated
    product of rho over the sequence. Weight 0 goes to tokens with rho outside the band (masked
    importance sampling, IcePop), to sequences with a geometric mean of rho outside the band, and to
    sequences with a token below the veto.
    """
    gaps = (proximal_logprobs - behavior_logprobs).detach()
    weights = _truncated(settings, gaps, sequences)
    kept = _kept(settings, gaps, sequences)
    return torch.where(kept, weights, 0.0), kept


def _truncated(
    settings: CorrectionConfig, gaps: Float[Tensor, " M"], sequences: Int[Tensor, " M"]
) -> Float[Tensor, " M"]:
    if settings.weight == "none":
        return torch.ones_like(gaps)
    if settings.weight == "sequence":
        gaps = sequence_sums(gaps, sequences)
    return bounded_ratio(gaps).clamp(max=settings.cap or CAPS[settings.weight])


def _kept(
    settings: CorrectionConfig, gaps: Float[Tensor, " M"], sequences: Int[Tensor, " M"]
) -> Bool[Tensor, " M"]:
    kept = torch.ones_like(gaps, dtype=torch.bool)
    if settings.keep != "all":
        low, high = BANDS[settings.keep]
        low, high = settings.keep_low or low, settings.keep_high or high
        looked = sequence_means(gaps, sequences) if settings.keep == "geometric" else gaps
        ratio = bounded_ratio(looked)
        kept &= (low <= ratio) & (ratio <= high)
    if settings.veto:
        bad = (bounded_ratio(gaps) < settings.veto).to(gaps.dtype)
        kept &= sequence_sums(bad, sequences) == 0
    return kept
