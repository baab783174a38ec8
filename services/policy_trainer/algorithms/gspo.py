"""GSPO: one ratio a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.services.policy_trainer.algorithms.base import TokenBatch, TokenLoss
from paceline.services.policy_trainer.algorithms.grpo import Grpo
from paceline.services.policy_trainer.algorithms.losses import bounded_ratio, sequence_means


@dataclass(frozen=True, slots=True)
class Gspo(Grpo):
    """s_i = exp(mean over the tokens of sequence i of (policy - proximal)) is clipped in the place
    of the tokens' ratios (arXiv 2507.18071, eq. 7); the gradient is that of each token's log-prob
    over the length.
    """

    def loss(self, tokens: TokenBatch) -> TokenLoss:
        """Of each token, with the ratio of its sequence."""
        gaps = tokens.policy_logprobs - tokens.proximal_logprobs
        return self.surrogate(bounded_ratio(sequence_means(gaps, tokens.sequences)), tokens)
