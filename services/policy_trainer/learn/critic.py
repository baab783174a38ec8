"""The critic of PPO, sharded as the policy: learns the remaining reward of a trajectory.

Shape letters: T trained tokens of the batch.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from paceline.services.policy_trainer.algorithm_settings import PpoConfig
from paceline.services.policy_trainer.algorithms.losses import clipped_value_loss
from paceline.services.policy_trainer.batches.batch import MicroBatch, TrainBatch
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn import minibatches, objective
from paceline.services.policy_trainer.learn.model import ValueModel, pair_cost
from paceline.training.optimizer import NamedOptimizer


class Critic:
    """Model and optimiser of this rank. All methods are collective."""

    def __init__(
        self, config: PolicyTrainerConfig, settings: PpoConfig, model: ValueModel, mesh: DeviceMesh
    ) -> None:
        self.model = model
        self._settings = settings
        self._packer = minibatches.Packer(config, mesh, pair_cost(model))
        self._updates = 0
        self.warmup_steps = settings.critic_warmup_steps  # first steps that train it alone
        optimizer = config.optimizer.model_copy(update={"lr": settings.critic_lr})
        self.optimizer = NamedOptimizer(
            dict(model.named_parameters()), optimizer, moments=optimizer.moments
        )

    def update(
        self,
        batch: TrainBatch,
        part: minibatches.MiniBatch,
        old_values: Float[Tensor, " T"],
        returns: Float[Tensor, " T"],
        figures: objective.Figures,
    ) -> float:
        """One update towards the returns. Returns the gradient's norm before clipping. If loss or
        gradient is not finite, the norm is not finite and the update is not taken.
        """

        def losses_of(micro: MicroBatch) -> Tensor:
            at, values = micro.tokens.cpu(), self.model(micro)
            wanted, old = returns[at].to(values.device), old_values[at].to(values.device)
            losses = clipped_value_loss(values, old, wanted, value_clip=self._settings.value_clip)
            figures.add({"value_loss": losses.detach(), "value_error": (old - wanted).abs()})
            return losses

        self.optimizer.forget()
        total = self._packer.accumulate(self.model, batch, part, losses_of)
        norm = self.optimizer.step(self._updates + 1) if math.isfinite(total) else math.nan
        self._updates += math.isfinite(norm)
        return norm

    def state(
        self,
        mesh: DeviceMesh | None,
        into: Mapping[str, Any] | None,
        numbers: Callable[[Tensor], Tensor],
    ) -> dict[str, Any]:
        """As Learner.state. `numbers`: returns the values of a shard."""
        return {**self.optimizer.state(mesh, into, numbers), "updates": self._updates}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """As Learner.load_state."""
        self.optimizer.load_state(state)
        self._updates = state["updates"]
