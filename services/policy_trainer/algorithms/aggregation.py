"""Combines the losses of tokens into one number, as pure functions.

Shape letters: T trained tokens, S sessions.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.services.policy_trainer.algorithm_settings import Aggregation


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
