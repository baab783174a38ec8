"""Accumulates gradients over micro-batches and steps the drafter's optimiser."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from paceline.models.config import ModelConfig
from paceline.services.drafter_trainer.config import DrafterOptimizerConfig, DrafterTrainerConfig
from paceline.services.drafter_trainer.learn import heads, membership
from paceline.services.drafter_trainer.learn.sharded import ShardedDrafter, move
from paceline.speculators import kinds, packed
from paceline.speculators.net import DraftNet, read_drafter, trained_net
from paceline.training.process import on_device

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True, slots=True)
class MicroResult:
    """Result of one micro-batch."""

    loss: float  # mean over its positions
    positions: int
    stepped: bool  # whether it completed an optimiser step
    terms: dict[str, float]  # means over its positions, see Objective.terms
    skipped: bool = False  # a step was due, but its gradient was not finite


class DrafterLearner:
    """A drafter sharded over the members. It steps once the members together have added
    `micro_batches` rows.

    A step therefore uses the same number of rows for any members, or slightly more if the members
    do not divide that number. Gradients are sums over positions until the step divides them by the
    positions of all rows. A partial gradient can thus wait through a preemption or a change of
    members, with equal weight for every position.
    """

    def __init__(
        self,
        net: DraftNet,
        config: DrafterOptimizerConfig,
        *,
        micro_batches: int,
        members: membership.Members | None = None,
    ) -> None:
        self.kind = net.kind.name
        self._whole = net.twin()  # never sharded: the source of snapshots
        self._config, self._micro_batches = config, micro_batches
        self.members = members or membership.on_cpu(dist.get_world_size())
        self._sharded = (
            ShardedDrafter(net, config, self.members) if self.members.takes_part else None
        )
        # rows of all members, positions of this rank
        self._pending_rows, self._pending_positions = 0, 0
        self._bound: heads.PolicyHead | None = None
        self.total_steps, self.total_tokens = 0, 0

    @property
    def sharded(self) -> ShardedDrafter:
        """This rank's shards; members only."""
        assert self._sharded is not None
        return self._sharded

    def micro_step(self, row: packed.PackedRow, head: heads.PolicyHead) -> MicroResult:
        """Adds this rank's row; steps the optimiser when the batch is complete."""
        self._bind(head)
        loss, positions, terms = self.sharded.net(on_device(row, self.members.device))
        loss.backward()
        count = int(positions)
        self._pending_rows += self.members.size
        self._pending_positions += count
        due = self._pending_rows >= self._micro_batches
        stepped = due and self._optimizer_step()
        share = 1.0 / max(count, 1)
        means = {name: float(value) * share for name, value in terms.items()}
        return MicroResult(float(loss.detach()) * share, count, stepped, means, due and not stepped)

    def _bind(self, head: heads.PolicyHead) -> None:
        if self._bound is not head:
            device = self.members.device
            self.sharded.net.bind(head.embed_tokens.to(device), head.lm_head.to(device))
            self._bound = head

    def _optimizer_step(self) -> bool:
        """Returns False if the gradient was not finite: it is dropped, and no step is counted."""
        positions = torch.tensor(float(self._pending_positions), dtype=torch.float64)
        if self.members.size > 1:
            dist.all_reduce(positions, group=self.members.group)
        for parameter in self.sharded.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / max(float(positions), 1.0))
        self._pending_rows, self._pending_positions = 0, 0
        if not self.sharded.step(self.total_steps + 1):
            return False
        self.total_steps += 1
        self.total_tokens += int(positions)
        return True

    def attach(self, members: membership.Members) -> None:
        """Moves everything to the devices of `members`; shards anew if the members changed.

        Collective over all ranks.
        """
        if members is not self.members:
            self._reshard(members)
        if self._sharded is not None:
            self._sharded.to_device()

    def _reshard(self, members: membership.Members) -> None:
        counters = torch.tensor([self.total_steps, self.total_tokens, self._pending_rows])
        positions = torch.tensor(float(self._pending_positions), dtype=torch.float64)
        if dist.get_world_size() > 1:
            dist.broadcast(counters, 0)
            dist.all_reduce(positions)
        self.total_steps, self.total_tokens, self._pending_rows = counters.tolist()
        self._pending_positions = int(positions) if dist.get_rank() == 0 else 0
        new = (
            ShardedDrafter(self._whole.twin(), self._config, members)
            if members.takes_part
            else None
        )
        move(self._sharded, new, gradients=self._pending_rows > 0)
        self._sharded, self.members, self._bound = new, members, None

    def begin_again(self, start: DraftNet | None = None) -> None:
        """Continues from rank 0's weights `start`, without moments or partial gradient; the step
        count continues. Collective over the members.
        """
        net = self._whole.twin()
        if start is not None:
            net.load_tensors(start.state_dict())
        if self.members.size > 1:
            for tensor in net.state_dict().values():
                dist.broadcast(tensor, 0, group=self.members.group)
        self._sharded = ShardedDrafter(net, self._config, self.members)
        self._pending_rows, self._pending_positions, self._bound = 0, 0, None

    def offload(self) -> None:
        """Leaves the device; all state waits on the CPU, including a partial gradient."""
        if self._sharded is not None and self.members.device.type != "cpu":
            self._sharded.net.bind(torch.empty(0), torch.empty(0))
            self._bound = None
            self._sharded.offload()

    def snapshot(self) -> DraftNet:
        """A whole, unsharded copy of the present drafter with its averaged weights, on rank 0.
        Collective over the members.
        """
        tensors: dict[str, Any] = get_model_state_dict(self.sharded.net, options=_FULL)
        averaged = self.sharded.averaged()
        copy = self._whole.twin()
        if tensors:  # only rank 0 receives the full state
            copy.load_tensors({**tensors, **averaged})
        return copy.eval()

    def state(self) -> dict[str, Any]:
        """The state for a later process, as copies on the CPU; see ShardedDrafter.named. Members
        only.

        It excludes a partial gradient, so a checkpoint loses less than one step.
        """
        return {
            **self.sharded.copies(self.sharded.named()),
            "total_steps": self.total_steps,
            "total_tokens": self.total_tokens,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the `state` of the same number of members."""
        self.sharded.load_state(state)
        self.total_steps, self.total_tokens = state["total_steps"], state["total_tokens"]


def initial_net(config: DrafterTrainerConfig, target: ModelConfig) -> DraftNet:
    """The drafter at the start of a run. Raises ConfigError, InvalidInput or WeightsError."""
    if (directory := kinds.drafter_directory(config.drafter)) is not None:
        return read_drafter(directory, target)
    net = trained_net(config.drafter)
    return net.fresh(target, net.read_options(config.options), config.run.seed)
