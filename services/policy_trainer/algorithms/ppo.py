"""The algorithms with one advantage per token: PPO with a critic, and REINFORCE++."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from paceline.services.policy_trainer.algorithm_settings import PpoConfig, ReinforceConfig
from paceline.services.policy_trainer.algorithms import advantages, base, grpo


@dataclass(frozen=True, slots=True)
class Ppo(grpo.Clipped):
    """Generalised advantages (arXiv 1506.02438), normalised over the batch, and the clipped
    surrogate (arXiv 1707.06347). A trajectory's reward is at its last token.
    """

    settings: PpoConfig

    def needs(self) -> base.Needs:
        """Adds the critic's values."""
        return replace(super(Ppo, self).needs(), values=True)

    def advantages(self, batch: base.SessionBatch) -> Float[Tensor, " T"]:
        """Advantage of each token."""
        return advantages.normalized(self.estimates(batch))

    def estimates(self, batch: base.SessionBatch) -> Float[Tensor, " T"]:
        """Advantages before normalisation. Advantage plus value of a token is the return that the
        critic learns.
        """
        return advantages.generalized_advantages(
            advantages.at_last_tokens(batch.rewards, batch.owners) - batch.penalties,
            batch.values,
            batch.owners,
            gamma=self.settings.gamma,
            gae_lambda=self.settings.gae_lambda,
        )


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlus(grpo.Clipped):
    """A_t = r - sum of the penalties from t on, normalised over all tokens of the batch (arXiv
    2501.03262, eq. 5). With the baseline, r is first compared within its group (section 3.3).
    """

    settings: ReinforceConfig

    def advantages(self, batch: base.SessionBatch) -> Float[Tensor, " T"]:
        """Advantages; 0 if all tokens of the batch would have the same."""
        rewards = batch.rewards
        if self.settings.name == "reinforce_plus_plus_baseline":
            rewards = advantages.group_relative(
                rewards, batch.groups, batch.weights, normalize_std=False
            )
        earned = advantages.at_last_tokens(rewards, batch.owners) - batch.penalties
        return advantages.normalized(advantages.returns_to_go(earned, batch.owners))
