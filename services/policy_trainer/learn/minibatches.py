"""Cuts a batch into mini-batches of whole groups, and mini-batches into packed micro-batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.services.policy_trainer.algorithms.losses import token_weights
from paceline.services.policy_trainer.batches import packing
from paceline.services.policy_trainer.batches.batch import MicroBatch, TrainBatch, make_micro_batch
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.training.process import on_device


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The trajectories of one update (B of the batch), and the loss weight of each token (T of the
    batch; 0 for tokens outside the update).
    """

    members: Bool[Tensor, " B"]
    token_weights: Float[Tensor, " T"]


class Packer:
    """Packs chosen trajectories into rows for this rank."""

    def __init__(self, config: PolicyTrainerConfig, mesh: DeviceMesh, pair_cost: float) -> None:
        """`pair_cost`: cost of the model that reads the rows, see model.pair_cost."""
        self._config = config
        self._mesh = mesh
        self._pair_cost = pair_cost
        self._shares = config.attention != "flash"  # flash supports documents only

    def micro_batches(self, batch: TrainBatch, chosen: Bool[Tensor, " B"]) -> Iterator[MicroBatch]:
        """This rank's micro-batches, as many as on every rank, possibly empty. Trajectories without
        a trained token are left out.
        """
        owned = torch.bincount(batch.owners, minlength=len(chosen)) > 0
        numbers = (chosen & owned).nonzero().flatten().tolist()
        units, plan = self._packing(batch, numbers)
        for rows in plan[self._mesh.get_rank()]:
            packed = [[numbers[i] for u in row for i in units[u].members] for row in rows]
            micro = make_micro_batch(batch, packed, shares=self._shares)
            yield on_device(micro, self._mesh.device_type)

    def accumulate(
        self,
        model: nn.Module,
        batch: TrainBatch,
        part: MiniBatch,
        losses_of: Callable[[MicroBatch], Float[Tensor, " M"]],
        on_micro_batch: Callable[[int, int], None] = lambda number, of: None,
    ) -> float:
        """Accumulates gradients of the mini-batch's loss; returns that loss, equal on all ranks.

        `losses_of`: losses of a micro-batch's tokens. Ranks average their gradients, so each rank's
        part is scaled by the number of ranks. The result is the gradient of the whole mini-batch,
        for any number of ranks and any split.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device_type)
        micro_batches = list(self.micro_batches(batch, part.members))
        for number, micro in enumerate(micro_batches, 1):
            on_micro_batch(number, len(micro_batches))
            # Without a sync every rank accumulates whole gradients.
            last = number == len(micro_batches)
            model.set_requires_gradient_sync(last or self._config.reshard_after_forward)  # type: ignore[operator]
            losses = losses_of(micro)
            loss = (losses * part.token_weights[micro.tokens.cpu()].to(losses.device)).sum()
            (loss * self._mesh.size()).backward()
            total += loss.detach()
        dist.all_reduce(total)
        return float(total)

    def _packing(self, batch: TrainBatch, numbers: Sequence[int]) -> packing.Packing:
        """The packing; equal on every rank."""
        config, inputs = self._config, batch.inputs(numbers)
        # Without sharing, each trajectory is a group of its own.
        groups = batch.groups[list(numbers)].tolist() if self._shares else range(len(inputs))
        alike = packing.neighbours(inputs, groups)

        def laid_out(row_tokens: int) -> packing.Packing:
            units = packing.prefix_units(alike, row_tokens)
            plan = packing.plan_micro_batches(
                [unit.tokens for unit in units],
                world_size=self._mesh.size(),
                row_tokens=row_tokens,
                tokens_per_micro_batch=config.tokens_per_micro_batch,
            )
            return packing.Packing(units, plan)

        if config.row_tokens:
            return laid_out(config.row_tokens)
        return packing.cheapest(
            map(laid_out, packing.widths(config.tokens_per_micro_batch)), self._pair_cost
        )


def mini_batches(batch: TrainBatch, config: PolicyTrainerConfig) -> list[MiniBatch]:
    """The configured number of mini-batches, without empty mini-batches: group g is in mini-batch g
    modulo that number.
    """
    settings = config.algorithm
    parts = []
    for number in range(settings.mini_batches):
        members = batch.groups % settings.mini_batches == number
        own = members[batch.owners]
        if not own.any():
            continue
        weights = torch.zeros(len(own))
        weights[own] = token_weights(
            settings.aggregation,
            batch.sessions[batch.owners[own]],
            len(batch.sessions[members].unique()),
            settings.aggregation_tokens,
        )
        parts.append(MiniBatch(members, weights))
    return parts
