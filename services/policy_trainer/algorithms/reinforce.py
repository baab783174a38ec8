"""REINFORCE++, with a global normalisation instead of a critic."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from paceline.services.policy_trainer.algorithm_settings import ReinforceConfig
from paceline.services.policy_trainer.algorithms.advantages import (
    at_last_tokens,
    group_relative,
    normalized,
    returns_to_go,
)
from paceline.services.policy_trainer.algorithms.base import SessionBatch
from paceline.services.policy_trainer.algorithms.surrogate import Clipped


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlus(Clipped):
    """A_t = r - sum of the penalties from t on, normalised over all tokens of the batch (arXiv
    2501.03262, eq. 5). With the baseline, r is first compared within its group (section 3.3).
    """

    settings: ReinforceConfig

    def advantages(self, batch: SessionBatch) -> Float[Tensor, " T"]:
        """Advantages; 0 if all tokens of the batch would have the same."""
        rewards = batch.rewards
        if self.settings.name == "reinforce_plus_plus_baseline":
            rewards = group_relative(rewards, batch.groups, batch.weights, normalize_std=False)
        earned = at_last_tokens(rewards, batch.owners) - batch.penalties
        return normalized(returns_to_go(earned, batch.owners))
