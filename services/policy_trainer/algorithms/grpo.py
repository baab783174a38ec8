"""GRPO, Dr. GRPO and decoupled PPO: rewards are compared within their group."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from paceline.services.policy_trainer.algorithm_settings import GroupedConfig
from paceline.services.policy_trainer.algorithms.advantages import group_relative
from paceline.services.policy_trainer.algorithms.base import SessionBatch
from paceline.services.policy_trainer.algorithms.surrogate import Clipped


@dataclass(frozen=True, slots=True)
class Grpo(Clipped):
    """A = (r - mean) / (std + eps) within the group, equal for all tokens of a trajectory (arXiv
    2402.03300).

    In the group's statistics a session counts once, for any number of branches. In the loss every
    generated token counts once: a token shared by several branches is masked in all branches but
    one.
    """

    settings: GroupedConfig

    def advantages(self, batch: SessionBatch) -> Float[Tensor, " T"]:
        """Advantages; 0 for groups without variance."""
        std = self.settings.normalize_std
        made = group_relative(batch.scores, batch.groups, batch.weights, normalize_std=std)
        return made[batch.owners]


@dataclass(frozen=True, slots=True)
class DrGrpo(Clipped):
    """A = r - mean (arXiv 2503.20783). Its settings divide the summed losses by a constant instead
    of a length.
    """

    def advantages(self, batch: SessionBatch) -> Float[Tensor, " T"]:
        """Advantages; 0 for groups without variance."""
        made = group_relative(batch.scores, batch.groups, batch.weights, normalize_std=False)
        return made[batch.owners]


@dataclass(frozen=True, slots=True)
class Decoupled(Grpo):
    """L_t = -min(rho_t, cap) min(u_t A_t, clip(u_t) A_t), rho_t = proximal / behavior (AReaL, arXiv
    2505.24298, eq. 5; PPO-EWMA, arXiv 2110.00641). The clip holds the policy near the step's start,
    for any age of the sampling weights. The weight rho is the correction in its settings.
    """
