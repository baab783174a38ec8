"""PPO with a critic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from paceline.services.policy_trainer.algorithm_settings import PpoConfig
from paceline.services.policy_trainer.algorithms.advantages import (
    at_last_tokens,
    generalized_advantages,
    normalized,
)
from paceline.services.policy_trainer.algorithms.base import Needs, SessionBatch
from paceline.services.policy_trainer.algorithms.surrogate import Clipped


@dataclass(frozen=True, slots=True)
class Ppo(Clipped):
    """Generalised advantages (arXiv 1506.02438), normalised over the batch, and the clipped
    surrogate (arXiv 1707.06347). A trajectory's reward is at its last token.
    """

    settings: PpoConfig

    def needs(self) -> Needs:
        """Adds the critic's values."""
        return replace(super(Ppo, self).needs(), values=True)

    def advantages(self, batch: SessionBatch) -> Float[Tensor, " T"]:
        """Advantage of each token."""
        return normalized(self.estimates(batch))

    def estimates(self, batch: SessionBatch) -> Float[Tensor, " T"]:
        """Advantages before normalisation. Advantage plus value of a token is the return that the
        critic learns.
        """
        return generalized_advantages(
            at_last_tokens(batch.rewards, batch.owners) - batch.penalties,
            batch.values,
            batch.owners,
            gamma=self.settings.gamma,
            gae_lambda=self.settings.gae_lambda,
        )
