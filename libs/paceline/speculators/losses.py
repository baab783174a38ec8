"""Losses of drafters; pure tensor functions. Owns no batching and no network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
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

    Row t of `predicted` is f_t, row t of `target` is h_{t+1}, both states that W = lm_head turns into logits of
    token t+2. The head is not trained.
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
