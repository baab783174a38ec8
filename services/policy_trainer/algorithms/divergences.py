"""Estimates the distance of the policy from its reference, as pure functions.

Shape letters: M trained tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.services.policy_trainer.algorithms.losses import LARGEST_LOG_RATIO


def divergence(
    policy_logprobs: Float[Tensor, " M"],
    reference_logprobs: Float[Tensor, " M"],
    estimator: Literal["k1", "k2", "k3"],
) -> Float[Tensor, " M"]:
    """Estimates of KL(policy || reference) at tokens that the policy drew (Schulman 2020,
    "Approximating KL divergence"), with d = reference - policy:

        k1 = -d            unbiased; negative at times
        k2 = d^2 / 2       biased; its gradient is that of the divergence
        k3 = e^d - d - 1   unbiased, never negative
    """
    d = (reference_logprobs - policy_logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    match estimator:
        case "k1":
            return -d
        case "k2":
            return d.square() / 2
        case "k3":
            return torch.expm1(d) - d
