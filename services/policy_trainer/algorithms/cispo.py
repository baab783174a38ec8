"""CISPO: clips the weight of a token, and keeps its gradient."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.services.policy_trainer.algorithms.base import TokenBatch, TokenLoss
from paceline.services.policy_trainer.algorithms.grpo import Grpo
from paceline.services.policy_trainer.algorithms.losses import bounded_ratio


@dataclass(frozen=True, slots=True)
class Cispo(Grpo):
    """L_t = -sg(clip(u_t, 1 - clip_low, 1 + clip_high)) A_t log policy_t (MiniMax-M1, arXiv
    2506.13585, eq. 4). A token beyond the bounds keeps a gradient.
    """

    def loss(self, tokens: TokenBatch) -> TokenLoss:
        """Loss of each token."""
        ratio = bounded_ratio(tokens.policy_logprobs - tokens.proximal_logprobs).detach()
        weight = ratio.clamp(1.0 - self.settings.clip_low, 1.0 + self.settings.clip_high)
        losses = -weight * tokens.advantages * tokens.policy_logprobs
        return TokenLoss(losses, weight != ratio, {"ratio": ratio})
