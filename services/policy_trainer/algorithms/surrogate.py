"""The clipped surrogate of a token's ratio, shared by most algorithms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.services.policy_trainer.algorithm_settings import AlgorithmConfig
from paceline.services.policy_trainer.algorithms.base import Needs, TokenBatch, TokenLoss
from paceline.services.policy_trainer.algorithms.losses import bounded_ratio, clipped_surrogate


@dataclass(frozen=True, slots=True)
class Clipped:
    """L_t = -min(u_t A_t, clip(u_t) A_t), u_t = exp(policy - proximal); see clipped_surrogate."""

    settings: AlgorithmConfig

    def needs(self) -> Needs:
        """Requirements of the settings: several updates need log-probs at the step's start. A
        divergence needs the reference; subtracted from the reward, it needs both.
        """
        settings = self.settings
        several = settings.mini_batches * settings.passes > 1
        kl = settings.kl.coefficient > 0
        return Needs(proximal=several or (kl and settings.kl.place == "reward"), reference=kl)

    def loss(self, tokens: TokenBatch) -> TokenLoss:
        """Loss of each token, with the token's own ratio."""
        ratio = bounded_ratio(tokens.policy_logprobs - tokens.proximal_logprobs)
        return self.surrogate(ratio, tokens)

    def surrogate(self, ratio: Tensor, tokens: TokenBatch) -> TokenLoss:
        """Loss of each token with the given ratio [M]."""
        losses, clipped = clipped_surrogate(
            ratio,
            tokens.advantages,
            clip_low=self.settings.clip_low,
            clip_high=self.settings.clip_high,
            dual_clip=self.settings.dual_clip,
        )
        return TokenLoss(losses, clipped, {"ratio": ratio.detach()})
