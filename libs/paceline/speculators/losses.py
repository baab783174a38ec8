"""Computes the losses of drafters: pure tensor functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from paceline.speculators.net import Objective


def eagle_loss(
    predicted: Float[Tensor, "T H"],
    target: Float[Tensor, "T H"],
    lm_head: Float[Tensor, "V H"],
    valid: Bool[Tensor, " T"],
    *,
    feature_weight: float = 1.0,
    token_weight: float = 0.1,
) -> Objective:
    """EAGLE-1 objective (Li et al. 2024, section 3.3), summed over the valid positions.

    loss_t = feature_weight * mean_H SmoothL1(f_t - h_{t+1})
           + token_weight * CE(softmax(W h_{t+1}), log_softmax(W f_t))

    Row t of `predicted` is f_t, row t of `target` is h_{t+1}, both states that W = lm_head turns
    into logits of token t+2. The head is not trained.
    """
    predicted, target = predicted[valid], target[valid]
    feature = F.smooth_l1_loss(predicted, target, reduction="none").mean(dim=-1).sum()
    predicted_logits, target_logits = predicted @ lm_head.T, target @ lm_head.T
    log_q = torch.log_softmax(predicted_logits.float(), dim=-1)
    token = -(torch.softmax(target_logits.float(), dim=-1) * log_q).sum()
    correct = (predicted_logits.argmax(-1) == target_logits.argmax(-1)).sum()
    return Objective(
        loss=feature_weight * feature + token_weight * token,
        positions=valid.sum(),
        terms={"feature": feature.detach(), "token": token.detach(), "correct": correct},
    )


DraftLoss = Literal["soft_ce", "lk_alpha", "lk_hybrid"]
"""Losses of a drafter with its own head, see draft_losses."""

_KL_FADING = 3.0
"""Speed at which lk_hybrid changes from KL to acceptance as acceptance grows."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's distributions p over a drafter's Vd tokens."""

    log_p: Float[Tensor, "T Vd"]
    """log p of the draftable tokens, not renormalised: the missing mass can only be rejected."""
    drafted: Bool[Tensor, " T"]
    """Whether the target's most likely token is draftable."""


@torch.no_grad()
def teacher_of(
    states: Float[Tensor, "T H"], lm_head: Float[Tensor, "V H"], t2d: Bool[Tensor, " V"]
) -> Teacher:
    """Teacher of the target's last hidden states; t2d: mask of draftable tokens."""
    log_p = torch.log_softmax((states @ lm_head.T.to(states.dtype)).float(), dim=-1)
    return Teacher(log_p[:, t2d], t2d[log_p.argmax(-1)])


def draft_losses(
    logits: Float[Tensor, "N Vd"], log_p: Float[Tensor, "N Vd"], kind: DraftLoss
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Loss of each position and its acceptance alpha = sum_v min(p_v, q_v), both with gradients.

    q = softmax(logits); p as in Teacher; p' = p / sum_v p_v over the draftable tokens v.

    soft_ce: -sum_v p'_v log q_v (EAGLE-3, Li et al. 2025, arXiv 2503.01840). lk_alpha: -log alpha;
    lk_hybrid: w KL(p' | q) + (1 - w) (1 - alpha), w = exp(-3 alpha) without gradient (LK losses,
    arXiv 2602.23881).
    """
    log_q = torch.log_softmax(logits.float(), dim=-1)
    # In logs: alpha of an untrained drafter may be too small for a float.
    log_alpha = torch.logsumexp(torch.minimum(log_p, log_q), dim=-1)
    alpha = log_alpha.exp()
    if kind == "lk_alpha":
        return -log_alpha, alpha
    log_taught = torch.log_softmax(log_p, dim=-1)
    cross_entropy = -(log_taught.exp() * log_q).sum(-1)
    if kind == "soft_ce":
        return cross_entropy, alpha
    kl = cross_entropy + (log_taught.exp() * log_taught).sum(-1)
    weight = torch.exp(-_KL_FADING * alpha.detach())
    return weight * kl + (1 - weight) * (1 - alpha), alpha


@dataclass(frozen=True, slots=True)
class BlockTargets:
    """Targets for drafts of blocks, at each of T positions of a row."""

    next_states: Float[Tensor, "T H"]
    lm_head: Float[Tensor, "V H"]
    soft: Bool[Tensor, " T"]
    """Where true, the target is the distribution softmax(lm_head h), else the token."""
    tokens: Int[Tensor, " T"]


def block_losses(
    logits: Float[Tensor, "M V"], targets: BlockTargets, places: Int[Tensor, " M"]
) -> tuple[Float[Tensor, " M"], Bool[Tensor, " M"]]:
    """Cross-entropy of each draft to the target at its place, and whether the most likely token is
    the target's most likely or drawn one.
    """
    soft, log_q = targets.soft[places], torch.log_softmax(logits.float(), dim=-1)
    # Each distribution is computed once, even if several blocks draft the same token.
    needed = torch.zeros_like(targets.soft).index_fill(0, places[soft], value=True)
    states = targets.next_states[needed]
    teacher = torch.softmax((states @ targets.lm_head.T.to(states.dtype)).float(), dim=-1)
    p = teacher[(needed.long().cumsum(0) - 1)[places[soft]]]
    tokens = targets.tokens[places]
    of_tokens = -log_q.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    losses = of_tokens.masked_scatter(soft, -(p * log_q[soft]).sum(-1))
    return losses, log_q.argmax(-1) == tokens.masked_scatter(soft, p.argmax(-1))
