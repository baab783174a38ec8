"""Computes the losses of drafters: pure tensor functions."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from paceline.speculators import net, packed

Targets = Literal["drawn", "distribution"]
"""What a draft learns: the policy's token, or the distribution it was drawn from."""


def eagle_loss(
    predicted: Float[Tensor, "T H"],
    target: Float[Tensor, "T H"],
    lm_head: Float[Tensor, "V H"],
    valid: Bool[Tensor, " T"],
    *,
    feature_weight: float = 1.0,
    token_weight: float = 0.1,
) -> net.Objective:
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
    return net.Objective(
        loss=feature_weight * feature + token_weight * token,
        positions=valid.sum(),
        terms={"feature": feature.detach(), "token": token.detach(), "correct": correct},
    )


@torch.no_grad()
def teacher_of(
    states: Float[Tensor, "T H"], lm_head: Float[Tensor, "V H"], t2d: Bool[Tensor, " V"]
) -> tuple[Float[Tensor, "T Vd"], Bool[Tensor, " T"]]:
    """From the target's last hidden states: its log p of the Vd draftable tokens (mask t2d), and
    whether its most likely token is draftable. p is not renormalised: the missing mass can only be
    rejected.
    """
    log_p = torch.log_softmax((states @ lm_head.T.to(states.dtype)).float(), dim=-1)
    return log_p[:, t2d], t2d[log_p.argmax(-1)]


def draft_losses(
    logits: Float[Tensor, "N Vd"], log_p: Float[Tensor, "N Vd"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Loss -sum_v p'_v log q_v of each position (EAGLE-3, Li et al. 2025, arXiv 2503.01840), and
    its acceptance sum_v min(p_v, q_v), without gradient.

    q = softmax(logits); p as in teacher_of; p' = p / sum_v p_v over the draftable tokens v.
    """
    log_q = torch.log_softmax(logits.float(), dim=-1)
    alpha = torch.minimum(log_p, log_q.detach()).exp().sum(-1)
    return -(torch.softmax(log_p, dim=-1) * log_q).sum(-1), alpha


def target_losses(
    logits: Float[Tensor, "M V"],
    row: packed.PackedRow,
    head: Float[Tensor, "V H"],
    places: Int[Tensor, " M"],
    targets: Targets,
) -> tuple[Float[Tensor, " M"], Bool[Tensor, " M"]]:
    """Cross-entropy of each draft to the target at its place in the row, the policy's token or its
    distribution softmax(head h); and whether the most likely token is the target's drawn or most
    likely one.
    """
    log_q = torch.log_softmax(logits.float(), dim=-1)
    if targets == "drawn":
        tokens = row.draft_tokens[places]
        return -log_q.gather(1, tokens[:, None])[:, 0], log_q.argmax(-1) == tokens
    # Each distribution is computed once, even if several blocks draft the same token.
    needed, which = places.unique(return_inverse=True)
    states = row.next_states[needed]
    p = torch.softmax((states @ head.T.to(states.dtype)).float(), dim=-1)[which]
    return -(p * log_q).sum(-1), log_q.argmax(-1) == p.argmax(-1)
