"""Corrects for tokens that another policy drew, as pure functions.

Shape letters: N trained tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def truncated_importance(
    proximal_logprobs: Float[Tensor, " N"], behavior_logprobs: Float[Tensor, " N"], *, cap: float
) -> Float[Tensor, " N"]:
    """w_t = min(exp(proximal - behavior), cap) without gradient: truncated importance sampling per
    token (Ionides 2008; in decoupled PPO, arXiv 2505.24298, section 5.2).
    """
    return torch.exp(proximal_logprobs - behavior_logprobs).clamp(max=cap).detach()
