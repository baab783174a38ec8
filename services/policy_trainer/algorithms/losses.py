"""Computes token log-probs, surrogates, divergences, corrections and weights of losses, as pure
functions.

Shape letters: M trained tokens of a micro-batch, T of a batch, V vocabulary, S sessions.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from paceline.services.policy_trainer.algorithm_settings import Aggregation, CorrectionConfig

LARGEST_LOG_RATIO = 20.0
"""Bound of log-ratios. Beyond it, exp() only shows that the ratio is too large."""


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


def token_weights(
    kind: Aggregation, sessions: Int[Tensor, " T"], session_count: int, constant: int
) -> Float[Tensor, " T"]:
    """Weight of each token's loss in the loss of a mini-batch; the loss is the weighted sum.

        token_mean                 1 / T        each token equally (DAPO, arXiv 2503.14476)
        sequence_mean_token_sum    1 / S        each session by its length
        sequence_mean_token_mean   1 / (S n)    each session equally (GRPO), n its tokens
        constant                   1 / (S c)    as the second, scaled by c (Dr. GRPO)

    `sessions`: number of each token's session. `session_count`: number of all sessions, including
    sessions without tokens. A session with branches is one sequence. All trained tokens of the
    closed groups count, also with advantage 0; otherwise the step would depend on the number of
    all-correct groups.
    """
    if kind == "token_mean":
        return torch.full(sessions.shape, 1.0 / max(len(sessions), 1), device=sessions.device)
    each = torch.full(sessions.shape, 1.0 / max(session_count, 1), device=sessions.device)
    if kind == "sequence_mean_token_sum":
        return each
    if kind == "constant":
        return each / constant
    sizes = torch.bincount(sessions, minlength=1)
    return each / sizes[sessions]


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
    weights, kept = torch.ones_like(gaps), torch.ones_like(gaps, dtype=torch.bool)
    if settings.weight != "none":
        weighed = sequence_sums(gaps, sequences) if settings.weight == "sequence" else gaps
        weights = bounded_ratio(weighed).clamp(max=settings.cap or CAPS[settings.weight])
    if settings.keep != "all":
        low, high = BANDS[settings.keep]
        low, high = settings.keep_low or low, settings.keep_high or high
        looked = sequence_means(gaps, sequences) if settings.keep == "geometric" else gaps
        ratio = bounded_ratio(looked)
        kept &= (low <= ratio) & (ratio <= high)
    if settings.veto:
        bad = (bounded_ratio(gaps) < settings.veto).to(gaps.dtype)
        kept &= sequence_sums(bad, sequences) == 0
    return torch.where(kept, weights, 0.0), kept
