"""Puts GRPO together: group-relative advantages and the clipped surrogate."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from policy_trainer.algorithms.advantages import group_relative
from policy_trainer.algorithms.base import TokenBatch, TokenLoss
from policy_trainer.algorithms.corrections import truncated_importance
from policy_trainer.algorithms.losses import clipped_surrogate
from policy_trainer.config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Grpo:
    """GRPO (arXiv 2402.03300) without a KL term; the token mean over the global batch is the
    caller's.

    In the group's statistics a session counts once, however many branches it has. In the loss every
    generated token counts once: tokens that branches share are masked in all but one, and a session
    weighs by the tokens it generated, the same in one branch or in several.
    """

    settings: AlgorithmConfig

    def advantages(
        self, rewards: Float[Tensor, " B"], groups: Int[Tensor, " B"], weights: Float[Tensor, " B"]
    ) -> Float[Tensor, " B"]:
        """(r - mean) / (std + eps) within the group; 0 for groups without variance."""
        return group_relative(rewards, groups, weights, normalize_std=self.settings.normalize_std)

    def loss(self, tokens: TokenBatch) -> TokenLoss:
        """Summed clipped surrogate; each token weighed by the truncated behavior ratio when a cap
        is set.
        """
        losses, clipped = clipped_surrogate(
            tokens.policy_logprobs,
            tokens.proximal_logprobs,
            tokens.advantages,
            clip_low=self.settings.clip_low,
            clip_high=self.settings.clip_high,
        )
        if self.settings.behavior_cap > 0:
            cap = self.settings.behavior_cap
            losses = losses * truncated_importance(
                tokens.proximal_logprobs, tokens.behavior_logprobs, cap=cap
            )
        return TokenLoss(losses.sum(), clipped.sum())
