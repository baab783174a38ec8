"""Combines the loss of a token: the algorithm's corrected loss, the divergence from the reference,
and the entropy.

Shape letters: M trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from paceline.services.policy_trainer.algorithm_settings import AlgorithmConfig
from paceline.services.policy_trainer.algorithms.base import Algorithm, TokenBatch
from paceline.services.policy_trainer.algorithms.corrections import correction_weights
from paceline.services.policy_trainer.algorithms.divergences import divergence


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The minimised objective, as a pure function of a micro-batch."""

    settings: AlgorithmConfig
    algorithm: Algorithm

    @property
    def has_divergence(self) -> bool:
        """Whether the loss contains the divergence from the reference."""
        return self.settings.kl.coefficient > 0 and self.settings.kl.place == "loss"

    @property
    def has_entropy(self) -> bool:
        """Whether the loss contains the entropy."""
        return self.settings.entropy_coefficient > 0

    def losses(
        self, tokens: TokenBatch, entropy: Float[Tensor, " M"]
    ) -> tuple[Float[Tensor, " M"], dict[str, Float[Tensor, " M"]]]:
        """Loss of each token, and figures for the report.

        w_t L_t + kl.coefficient D_t - entropy_coefficient H_t
        """
        own = self.algorithm.loss(tokens)
        weights, kept = correction_weights(
            self.settings.correction,
            tokens.proximal_logprobs,
            tokens.behavior_logprobs,
            tokens.sequences,
        )
        losses = weights * own.losses
        metrics = {
            **own.metrics,
            "clip_fraction": own.clipped.to(losses.dtype),
            "masked_fraction": (~kept).to(losses.dtype),
            "correction_weight": weights,
        }
        if self.has_divergence:
            kl = self.settings.kl
            apart = divergence(tokens.policy_logprobs, tokens.reference_logprobs, kl.estimator)
            losses = losses + kl.coefficient * apart
            metrics["divergence"] = apart.detach()
        if self.has_entropy:
            losses = losses - self.settings.entropy_coefficient * entropy
        return losses, metrics
