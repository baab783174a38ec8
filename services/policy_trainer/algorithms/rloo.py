"""RLOO: REINFORCE with the siblings' mean reward as its baseline."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from paceline.services.policy_trainer.algorithms.advantages import leave_one_out
from paceline.services.policy_trainer.algorithms.base import SessionBatch
from paceline.services.policy_trainer.algorithms.surrogate import Clipped


@dataclass(frozen=True, slots=True)
class Rloo(Clipped):
    """A_i = r_i - mean(r of the siblings) (arXiv 2402.14740, eq. 7), equal for all tokens of a
    trajectory.
    """

    def advantages(self, batch: SessionBatch) -> Float[Tensor, " T"]:
        """Advantages; 0 for groups without variance."""
        return leave_one_out(batch.scores, batch.groups, batch.weights)[batch.owners]
