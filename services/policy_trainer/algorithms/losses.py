"""Computes token log-probs, entropies and surrogates, as pure functions.

Shape letters: M trained tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Bound of log-ratios. Beyond it, exp() only shows that the ratio is too large."""


def token_logprobs(logits: Float[Tensor, "M V"], targets: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
    """log_softmax(logits)[target], natural log; logits are already divided by the temperature."""
    return logits.gather(-1, targets[:, None]).squeeze(-1) - torch.logsumexp(logits, dim=-1)


def token_entropy(logits: Float[Tensor, "M V"]) -> Float[Tensor, " M"]:
    """H = -sum_v p_v log p_v of softmax(logits), nats."""
    logprobs = torch.log_softmax(logits, dim=-1)
    return -(logprobs.exp() * logprobs).sum(dim=-1)


def bounded_ratio(log_ratio: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
    """exp(log_ratio), without overflow."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def sequence_sums(
    amounts: Float[Tensor, " M"], sequences: Int[Tensor, " M"]
) -> Float[Tensor, " M"]:
    """Sum over the tokens of a sequence, at each of its tokens."""
    count = int(sequences.max().item()) + 1 if sequences.numel() else 0
    return amounts.new_zeros(count).index_add(0, sequences, amounts)[sequences]


def sequence_means(
    amounts: Float[Tensor, " M"], sequences: Int[Tensor, " M"]
) -> Float[Tensor, " M"]:
    """Mean over the tokens of a sequence, at each of its tokens."""
    sizes = sequence_sums(torch.ones_like(amounts), sequences)
    return sequence_sums(amounts, sequences) / sizes


def clipped_surrogate(
    ratio: Float[Tensor, " M"],
    advantages: Float[Tensor, " M"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[Float[Tensor, " M"], Bool[Tensor, " M"]]:
    """L_t = -min(u_t A_t, clip(u_t, 1 - clip_low, 1 + clip_high) A_t), PPO (arXiv 1707.06347, eq.
    7) with DAPO's separate bounds (arXiv 2503.14476, eq. 10).

    With a dual clip c, a negative advantage loses at most c |A_t| (arXiv 1912.09729, eq. 5).
    Returns the losses and a mask of bounded tokens.
    """
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    gains, held = torch.minimum(plain, clipped), clipped < plain
    if dual_clip:
        floor = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        gains, held = torch.maximum(gains, floor), held | (gains < floor)
    return -gains, held


def clipped_value_loss(
    values: Float[Tensor, " M"],
    old_values: Float[Tensor, " M"],
    returns: Float[Tensor, " M"],
    *,
    value_clip: float,
) -> Float[Tensor, " M"]:
    """L_t = max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2, PPO's published value loss
    (openai/baselines, ppo2); without a clip if c is 0.
    """
    plain = (values - returns).square()
    if not value_clip:
        return plain / 2
    near = old_values + (values - old_values).clamp(-value_clip, value_clip)
    return torch.maximum(plain, (near - returns).square()) / 2
