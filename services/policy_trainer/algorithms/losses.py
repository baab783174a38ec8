"""Computes token log-probs, entropies and losses, as pure functions.

Shape letters: N trained tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def token_logprobs(logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """log_softmax(logits)[target], natural log; logits are already divided by the temperature."""
    return logits.gather(-1, targets[:, None]).squeeze(-1) - torch.logsumexp(logits, dim=-1)


def token_entropy(logits: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    """H = -sum_v p_v log p_v of softmax(logits), nats."""
    logprobs = torch.log_softmax(logits, dim=-1)
    return -(logprobs.exp() * logprobs).sum(dim=-1)


def clipped_surrogate(
    policy_logprobs: Float[Tensor, " N"],
    proximal_logprobs: Float[Tensor, " N"],
    advantages: Float[Tensor, " N"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """L_t = -min(u_t A_t, clip(u_t, 1 - clip_low, 1 + clip_high) A_t), u_t = exp(policy -
    proximal).

    PPO (arXiv 1707.06347, eq. 7) with the proximal policy of decoupled PPO (arXiv 2110.00641, eq.
    6) and DAPO's separate bounds (arXiv 2503.14476, eq. 10). Returns the losses and a 0/1 mark of
    the tokens where the clip holds.
    """
    ratio = torch.exp(policy_logprobs - proximal_logprobs)
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    plain, clipped = ratio * advantages, bounded * advantages
    return -torch.minimum(plain, clipped), (clipped < plain).to(ratio.dtype)
