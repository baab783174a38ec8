"""GSPO: one ratio per sequence."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.services.policy_trainer.algorithms.base import TokenBatch, TokenLoss
from paceline.services.policy_trainer.algorithms.grpo import Grpo
from paceline.services.policy_trainer.algorithms.losses import bounded_ratio, sequence_means


@dataclass(frozen=True, slots=True)
class Gspo(Grpo):
    """Clips s_i = exp(mean over the tokens of sequence i of (policy - proximal)) instead of token
    ratios (arXiv 2507.18071, eq. 7). The gradient is each token's log-prob gradient over the
    length.
    """

    def loss(self, tokens: TokenBatch) -> TokenLoss:
        """Loss of each token, with the ratio of its sequence."""
        gaps = tokens.policy_logprobs - tokens.proximal_logprobs
        return self.surrogate(bounded_ratio(sequence_means(gaps, tokens.sequences)), tokens)
