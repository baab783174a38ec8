"""DAPO: GRPO with a wider upper clip and a soft length limit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.services.policy_trainer.algorithm_settings import DapoConfig
from paceline.services.policy_trainer.algorithms.advantages import group_relative
from paceline.services.policy_trainer.algorithms.base import SessionBatch
from paceline.services.policy_trainer.algorithms.surrogate import Clipped


@dataclass(frozen=True, slots=True)
class Dapo(Clipped):
    """Clip-higher and token mean. From the reward of a trajectory of n generated tokens it
    subtracts (arXiv 2503.14476, eq. 13)

        penalty * clip((n - (limit - buffer)) / buffer, 0, 1)
    """

    settings: DapoConfig

    def advantages(self, batch: SessionBatch) -> Float[Tensor, " T"]:
        """Advantages; 0 for groups without variance."""
        shaped = replace(batch, rewards=batch.rewards - self.overlong(batch))
        return group_relative(shaped.scores, batch.groups, batch.weights)[batch.owners]

    def overlong(self, batch: SessionBatch) -> Float[Tensor, " B"]:
        """Penalty subtracted from each reward."""
        limit, buffer = self.settings.overlong_tokens, self.settings.overlong_buffer
        if not limit:
            return torch.zeros_like(batch.rewards)
        tokens = torch.bincount(batch.owners, minlength=len(batch.rewards))
        over = (tokens - (limit - buffer)) / max(buffer, 1)
        return self.settings.overlong_penalty * over.clamp(0, 1).to(batch.rewards.dtype)
