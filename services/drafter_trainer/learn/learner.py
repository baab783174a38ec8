"""Shards a drafter, its averaged weights and its optimiser over the members (FSDP2), accumulates
gradients over micro-batches, steps, and moves all of it to other members.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from paceline.errors import DataLoss
from paceline.models.config import ModelConfig
from paceline.models.products import prefers_bfloat16
from paceline.services.drafter_trainer import metrics
from paceline.services.drafter_trainer.config import DrafterOptimizerConfig, DrafterTrainerConfig
from paceline.services.drafter_trainer.learn import membership
from paceline.services.drafter_trainer.learn.membership import Members
from paceline.services.drafter_trainer.rows.sample import PolicyHead
from paceline.speculators import kinds, packed
from paceline.speculators.net import DraftNet, read_drafter, trained_net
from paceline.training import checkpoints, optimizer, shards
from paceline.training.offload import Offload
from paceline.training.process import on_device


class ShardedDrafter:
    """Network and optimiser over the members' ranks; members only. Starts on the device, with zero
    moments.

    Gradients are sums over the members' losses, not means. A single member has it whole: FSDP2
    around a network this small costs a third of a step.
    """

    def __init__(self, net: DraftNet, config: DrafterOptimizerConfig, members: Members) -> None:
        self.members, self.net = members, net.to(members.device)
        matrices = net.matrices() if config.kind == "muon" else []
        if members.size > 1:
            for part in (*net.shards(), net):
                fully_shard(part, mesh=members.mesh)
            for module in net.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
                    module.set_gradient_divide_factor(1.0)
        self.parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
        self.optimizer = optimizer.NamedOptimizer(
            self.parameters, config, matrices=matrices, iterations=config.iterations
        )
        self._decay = config.average
        self._averages = (
            {name: one.detach().clone() for name, one in self.parameters.items()}
            if config.average
            else {}
        )
        self._away: Offload | None = None

    def step(self, number: int, rate: float = 1.0) -> bool:
        """Takes optimiser step `number`, counted from 1, with a share `rate` of the learning rate;
        returns False if the gradient is not finite.

        The averages have a decay of min(average, n / (n + 9)), so at first they forget the start
        weights quickly.
        """
        if not math.isfinite(self.optimizer.step(number, rate)):
            return False
        if self._averages:
            share = 1 - min(self._decay, number / (number + 9))
            live = [shards.local_of(one.detach()) for one in self.parameters.values()]
            torch._foreach_lerp_(
                [shards.local_of(one) for one in self._averages.values()], live, share
            )
        return True

    def averaged(self) -> dict[str, Tensor]:
        """Whole averages on the CPU by name; empty without averages. Collective over the
        members.
        """
        return {name: _whole(one).cpu() for name, one in self._averages.items()}

    def named(self) -> dict[str, Tensor]:
        """Weights, averages and moments of this rank, live, by "model/<name>", "exp_avg/<name>" and
        so on.
        """
        found: dict[str, Tensor] = {f"model/{k}": v for k, v in self.net.state_dict().items()}
        for name in self.parameters:
            found |= {f"{key}/{name}": value for key, value in self.optimizer.moments(name).items()}
        return found | {f"average/{name}": value for name, value in self._averages.items()}

    def gradients(self) -> dict[str, Tensor]:
        """The partial gradients of this rank, live, by "gradient/<name>"."""
        found = {name: parameter.grad for name, parameter in self.parameters.items()}
        return {f"gradient/{name}": one for name, one in found.items() if one is not None}

    def copies(self, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the CPU of tensors from `named` and `gradients`, sharded as here."""
        mesh, numbers = self.members.cpu_mesh, self._away.numbers if self._away else shards.local_of
        return {
            key: checkpoints.copy_on_cpu(one, mesh, numbers=numbers) for key, one in live.items()
        }

    def offload(self) -> None:
        """Leaves the device; no effect on a CPU."""
        if self._away is None and self.members.device.type != "cpu":
            live = self.named() | self.gradients()
            self._away = Offload([one.detach() for one in live.values()])
            self._away.leave()

    def to_device(self) -> None:
        """Returns to the device that `offload` left."""
        if self._away is not None:
            self._away.enter()
            self._away = None

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores `copies` of `named` from the same number of members, nested by the parts of
        their names. Raises DataLoss for the state of another drafter.
        """
        found, here = dict(shards.tensors_of(state)), self.named()
        if found.keys() != here.keys():
            message = "a state of another drafter"
            raise DataLoss(message, seen=sorted(found)[:4], allowed=sorted(here)[:4])
        for key, value in here.items():
            checkpoints.copy_local(found[key], value)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def move(old: ShardedDrafter | None, new: ShardedDrafter | None, *, gradients: bool) -> None:
    """Moves all numbers from one membership to another, through rank 0. Collective over all ranks.

    `gradients`: whether to move a partial gradient.
    """
    found: dict[str, Tensor] = {}
    if old is not None:
        live = old.named() | (old.gradients() if gradients else {})
        found = {key: _whole(one) for key, one in old.copies(live).items()}
    if new is None:
        return
    if gradients:
        for parameter in new.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
    for key, target in (new.named() | new.gradients()).items():
        whole = found.get(key)
        if whole is None:
            whole = torch.zeros(target.shape, dtype=target.dtype)
        dist.broadcast(whole, 0, group=new.members.group)
        shards.local_of(target).copy_(shards.local_rows(whole, target))


_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True, slots=True)
class MicroResult:
    """Result of one micro-batch."""

    loss: float  # mean over its positions
    positions: int
    stepped: bool  # whether it completed an optimiser step
    terms: dict[str, float]  # means over its positions, see Objective.terms
    skipped: bool = False  # a step was due, but its gradient was not finite

    def record(self, kind: str, *, samples: int) -> None:
        """Records the metrics of a micro-batch of rank 0; `samples` counts the samples of all
        ranks.
        """
        metrics.POSITIONS.record(self.positions, drafter=kind)
        metrics.SAMPLES.record(samples, drafter=kind)
        metrics.STEPS.record(int(self.stepped), drafter=kind)
        metrics.STEPS_SKIPPED.record(int(self.skipped), drafter=kind)
        for term, value in {"total": self.loss, **self.terms}.items():
            metrics.LOSS.record(value, drafter=kind, term=term)


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
        self._bound: PolicyHead | None = None
        self.total_steps, self.total_tokens = 0, 0
        self.rate = 1.0
        """Share of the learning rate for the next steps."""

    @property
    def sharded(self) -> ShardedDrafter:
        """This rank's shards; members only."""
        assert self._sharded is not None
        return self._sharded

    def micro_step(self, row: packed.PackedRow, head: PolicyHead) -> MicroResult:
        """Adds this rank's row; steps the optimiser when the batch is complete."""
        self._bind(head)
        device = self.members.device
        rounded = device.type == "cpu" and prefers_bfloat16(head.lm_head.shape[1], device)
        with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
            loss, positions, terms = self.sharded.net(on_device(row, device))
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
        """Returns False if the gradient was not finite: it is dropped, and no step is counted."""
        positions = torch.tensor(float(self._pending_positions), dtype=torch.float64)
        dist.all_reduce(positions, group=self.members.group)
        for parameter in self.sharded.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / max(float(positions), 1.0))
        self._pending_rows, self._pending_positions = 0, 0
        if not self.sharded.step(self.total_steps + 1, self.rate):
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

    def snapshot(self, counts: Tensor | None = None) -> DraftNet:
        """A whole, unsharded copy of the present drafter with its averaged weights, on rank 0.
        Collective over the members.

        counts: rank 0's int64 [V] of the policy's tokens, which renew the draft vocabulary.
        """
        if (present := self.sharded.net.token_ids) is not None:
            size = len(self.sharded.net.get_buffer("t2d"))
            shared = torch.zeros(size, dtype=torch.int64) if counts is None else counts.clone()
            dist.broadcast(shared, 0, group=self.members.group)
            self.sharded.net.follow_tokens(shared.to(present.device))
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

    def export(self, state: dict[str, Any], checkpoint: Path, directory: Path) -> None:
        """Writes the whole drafter of a checkpoint with this `state` under "learner", with averaged
        weights, in the form that engines load. Raises DataLoss.
        """
        net = self._whole.twin()
        net.load_tensors(
            {
                name: tensor
                for part in ("model", "average")
                for name, tensor in checkpoints.read_each_whole(
                    checkpoint, f"learner/{part}", state
                )
            }
        )
        net.save(directory)


def initial_net(config: DrafterTrainerConfig, target: ModelConfig) -> DraftNet:
    """The drafter at the start of a run. Raises ConfigError, InvalidInput or WeightsError."""
    if (directory := kinds.drafter_directory(config.drafter)) is not None:
        return read_drafter(directory, target)
    net = trained_net(config.drafter)
    return net.fresh(target, net.read_options(config.options), config.run.seed)
