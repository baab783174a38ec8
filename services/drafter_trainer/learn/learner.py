"""Adds up gradients over micro-batches and steps the drafter's optimiser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from paceline.services.drafter_trainer.config import DrafterOptimizerConfig
from paceline.services.drafter_trainer.learn.heads import PolicyHead
from paceline.services.drafter_trainer.learn.membership import Members, on_cpu
from paceline.services.drafter_trainer.learn.sharded import ShardedDrafter, move
from paceline.speculators.net import DraftNet
from paceline.speculators.packed import PackedRow
from paceline.training.process import on_device

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True, slots=True)
class MicroResult:
    """One micro-batch."""

    loss: float  # mean over its positions
    positions: int
    stepped: bool  # it completed an optimiser step
    terms: dict[str, float]  # means over its positions, see Objective.terms
    skipped: bool = False  # a step was due, and its gradient not finite


class DrafterLearner:
    """A drafter sharded over the members, stepped as soon as they have added `micro_batches` rows
    between them.

    So a step learns from as many rows whoever the members are, or from a few more where they do not
    divide it. Gradients are sums over positions until the step divides them by the positions of all
    rows, so that a partial gradient can wait through a preemption or a change of membership and
    still weighs every position equally.
    """

    def __init__(
        self,
        net: DraftNet,
        config: DrafterOptimizerConfig,
        *,
        micro_batches: int,
        members: Members | None = None,
    ) -> None:
        self._whole = net.twin()  # never sharded: what snapshots are copied from
        self._config, self._micro_batches = config, micro_batches
        self.members = members or on_cpu(dist.get_world_size())
        self._sharded = (
            ShardedDrafter(net, config, self.members) if self.members.takes_part else None
        )
        # rows of all members, positions of this rank's
        self._pending_rows, self._pending_positions = (
            0,
            0,
        )
        self._bound: PolicyHead | None = None
        self.total_steps, self.total_tokens = 0, 0

    @property
    def sharded(self) -> ShardedDrafter:
        """What this rank holds; only members have it."""
        assert self._sharded is not None
        return self._sharded

    def micro_step(self, row: PackedRow, head: PolicyHead) -> MicroResult:
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

    def _bind(self, head: PolicyHead) -> None:
        if self._bound is not head:
            device = self.members.device
            self.sharded.net.bind(head.embed_tokens.to(device), head.lm_head.to(device))
            self._bound = head

    def _optimizer_step(self) -> bool:
        """False when the gradient was not finite: it is forgotten, and no step counted."""
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

    def attach(self, members: Members) -> None:
        """Brings everything to where `members` compute; shards anew when they are others.

        A collective of all ranks.
        """
        if members is not self.members:
            self._reshard(members)
        if self._sharded is not None:
            self._sharded.to_device()

    def _reshard(self, members: Members) -> None:
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
        sizes = (self.members.size, members.size)
        gradients = self._pending_rows > 0
        move(self._whole, self._config, self._sharded, new, sizes, gradients=gradients)
        self._sharded, self.members, self._bound = new, members, None

    def begin_again(self, start: DraftNet | None = None) -> None:
        """Goes on from the weights of `start`, which rank 0 has, without moments or a partial
        gradient; steps go on being counted. A collective of the members.
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
        """Leaves the device; what was learned waits on the CPU, a partial gradient too."""
        if self._sharded is not None and self.members.device.type != "cpu":
            self._sharded.net.bind(torch.empty(0), torch.empty(0))
            self._bound = None
            self._sharded.offload()

    def snapshot(self) -> DraftNet:
        """A whole, unsharded copy of the drafter as it is now, with its averaged weights, on rank
        0; a collective of the members.
        """
        tensors: dict[str, Any] = get_model_state_dict(self.sharded.net, options=_FULL)
        averaged = self.sharded.averaged()
        copy = self._whole.twin()
        if tensors:  # only rank 0 receives the full state
            copy.load_tensors({**tensors, **averaged})
        return copy.eval()

    def state(self) -> dict[str, Any]:
        """Everything a later process needs to go on, as copies on the CPU; see
        ShardedDrafter.state. Only members.

        A partial gradient is not part of it: a checkpoint loses less than one step of it.
        """
        return {
            **self.sharded.state(),
            "total_steps": self.total_steps,
            "total_tokens": self.total_tokens,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from the `state` of as many members."""
        self.sharded.load_state(state)
        self.total_steps, self.total_tokens = state["total_steps"], state["total_tokens"]
