"""Computes the losses of the policy's and the critic's tokens, and sums the figures of a step.

The critic learns the remaining reward of a trajectory and is sharded as the policy. Shape letters:
M trained tokens of a micro-batch, T of the batch.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from paceline.services.policy_trainer import algorithm_settings, audit
from paceline.services.policy_trainer.algorithms import losses as loss_functions
from paceline.services.policy_trainer.algorithms.base import Algorithm, TokenBatch
from paceline.services.policy_trainer.batches import packing
from paceline.services.policy_trainer.batches.batch import MicroBatch, TrainBatch
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.model import ValueModel, pair_cost
from paceline.tagged_json import from_object, to_object
from paceline.training.optimizer import NamedOptimizer
from paceline.training.process import from_all_ranks


def policy_losses(
    settings: algorithm_settings.AlgorithmConfig,
    algorithm: Algorithm,
    tokens: TokenBatch,
    entropy: Float[Tensor, " M"],
) -> tuple[Float[Tensor, " M"], dict[str, Float[Tensor, " M"]]]:
    """Loss of each token of the policy, and figures for the report.

    w_t L_t + kl.coefficient D_t - entropy_coefficient H_t
    """
    own = algorithm.loss(tokens)
    weights, kept = loss_functions.correction_weights(
        settings.correction, tokens.proximal_logprobs, tokens.behavior_logprobs, tokens.sequences
    )
    losses = weights * own.losses
    metrics = {
        **own.metrics,
        "clip_fraction": own.clipped.to(losses.dtype),
        "masked_fraction": (~kept).to(losses.dtype),
        "correction_weight": weights,
    }
    if settings.kl.in_loss:
        policy, reference = tokens.policy_logprobs, tokens.reference_logprobs
        apart = loss_functions.divergence(policy, reference, settings.kl.estimator)
        losses = losses + settings.kl.coefficient * apart
        metrics["divergence"] = apart.detach()
    if settings.entropy_coefficient:
        losses = losses - settings.entropy_coefficient * entropy
    return losses, metrics


_RATIO, _SQUARED, _LARGEST = "_ratio", "_ratio_squared", "behavior_gap_max"


class Figures:
    """Means and maxima by name, of this rank until they are `reduced`."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}  # sum, count
        self._maxima: dict[str, float] = {}
        self._cells: dict[str, audit.AuditCell] = {}

    def add(self, values: Mapping[str, Float[Tensor, " M"]]) -> None:
        """Adds one value per token, by name."""
        for name, value in values.items():
            total = self._sums.setdefault(name, [0.0, 0.0])
            total[0] += float(value.double().sum())
            total[1] += value.numel()

    def add_mismatch(
        self,
        gaps: Float[Tensor, " M"],
        lags: Int[Tensor, " M"],
        kinds: Mapping[str, Bool[Tensor, " M"]],
    ) -> None:
        """Records the difference between sampler and step's start: `gaps` is proximal - behavior
        per token.

        behavior_gap is the mean |gap|. behavior_k3 estimates KL(sampler || start) by e^gap - 1 -
        gap. Both are also recorded by lag, and for each of the `kinds` of tokens.
        """
        ratio = loss_functions.bounded_ratio(gaps)
        sizes = {"behavior_gap": gaps.abs(), "behavior_k3": ratio - 1 - gaps}
        self.add({**sizes, _RATIO: ratio, _SQUARED: ratio.square()})
        if len(gaps):
            largest = float(sizes["behavior_gap"].max())
            self._maxima[_LARGEST] = max(largest, self._maxima.get(_LARGEST, 0.0))
        for lag in lags.unique().tolist():
            self.add(_of(sizes, lags == lag, f"lag={lag}"))
        for name, chosen in kinds.items():
            self.add(_of(sizes, chosen, name))

    def add_audit(self, gaps: Float[Tensor, " M"], cells: Mapping[str, Bool[Tensor, " M"]]) -> None:
        """Adds the tokens of each audit cell; a gap that is not a number counts as the largest."""
        sizes = (
            gaps.abs()
            .double()
            .nan_to_num(audit.LARGEST_GAP, audit.LARGEST_GAP)
            .clamp(max=audit.LARGEST_GAP)
        )
        buckets = torch.log10((sizes / audit.LEAST_GAP).clamp(min=1.0)) * audit.PER_DECADE
        buckets = buckets.ceil().long().clamp(max=audit.BUCKETS - 1)
        for name, own in cells.items():
            counts = torch.bincount(buckets[own]).tolist()
            found = {str(number): count for number, count in enumerate(counts) if count}
            cell = audit.AuditCell(int(own.sum()), float(sizes[own].sum()), found)
            self._cells[name] = self._cells.get(name, audit.AuditCell()) + cell

    def reduced(self) -> tuple[dict[str, float], dict[str, audit.AuditCell]]:
        """Figures of all ranks without non-finite values, and audit cells, sorted by name.
        Collective.
        """
        sums: dict[str, list[float]] = {}
        maxima: dict[str, float] = {}
        audited: dict[str, audit.AuditCell] = {}
        own = {name: to_object(cell) for name, cell in self._cells.items()}
        for part, largest, cells in from_all_ranks((self._sums, self._maxima, own)):
            for name, cell in cells.items():
                read = from_object(audit.AuditCell, cell)
                audited[name] = audited.get(name, audit.AuditCell()) + read
            for name, (total, count) in part.items():
                one = sums.setdefault(name, [0.0, 0.0])
                one[0] += total
                one[1] += count
            for name, value in largest.items():
                maxima[name] = max(value, maxima.get(name, value))
        found = {name: total / count for name, (total, count) in sums.items() if count}
        ratio, squared = found.pop(_RATIO, 0.0), found.pop(_SQUARED, 0.0)
        if squared:
            found["effective_sample_size"] = ratio * ratio / squared  # share of the tokens
        every = sorted({**found, **maxima}.items())
        finite = {name: value for name, value in every if math.isfinite(value)}
        return finite, dict(sorted(audited.items()))


def _of(values: Mapping[str, Tensor], chosen: Tensor, label: str) -> dict[str, Tensor]:
    return {f"{name}/{label}": value[chosen] for name, value in values.items()}


class Critic:
    """Model and optimiser of this rank. All methods are collective."""

    def __init__(
        self,
        config: PolicyTrainerConfig,
        settings: algorithm_settings.PpoConfig,
        model: ValueModel,
        mesh: DeviceMesh,
    ) -> None:
        self.model = model
        self._settings = settings
        self._packer = packing.Packer(config, mesh, pair_cost(model))
        self._updates = 0
        self.warmup_steps = settings.critic_warmup_steps  # first steps that train it alone
        optimizer = config.optimizer.model_copy(update={"lr": settings.critic_lr})
        self.optimizer = NamedOptimizer(
            dict(model.named_parameters()), optimizer, moments=optimizer.moments
        )

    def update(
        self,
        batch: TrainBatch,
        part: packing.MiniBatch,
        old_values: Float[Tensor, " T"],
        returns: Float[Tensor, " T"],
        figures: Figures,
    ) -> float:
        """One update towards the returns. Returns the gradient's norm before clipping. If loss or
        gradient is not finite, the norm is not finite and the update is not taken.
        """

        def losses_of(micro: MicroBatch) -> Tensor:
            at, values = micro.tokens.cpu(), self.model(micro)
            wanted, old = returns[at].to(values.device), old_values[at].to(values.device)
            losses = loss_functions.clipped_value_loss(
                values, old, wanted, value_clip=self._settings.value_clip
            )
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
