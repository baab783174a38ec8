"""Shards a drafter, its averaged weights and its optimiser over the members (FSDP2), and moves all
of it to other members.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from paceline.errors import DataLoss
from paceline.services.drafter_trainer.config import DrafterOptimizerConfig
from paceline.services.drafter_trainer.learn.membership import Members
from paceline.speculators.net import DraftNet
from paceline.training import checkpoints, optimizer, shards
from paceline.training.offload import Aside, bring_back, give_back_cached, lay_aside


class ShardedDrafter:
    """Network and optimiser over the members' ranks; members only. Starts on the device, with zero
    moments.

    Gradients are sums over the members' losses, not means. A single member has it whole: FSDP2
    around a network this small costs a third of a step.
    """

    def __init__(self, net: DraftNet, config: DrafterOptimizerConfig, members: Members) -> None:
        self.members, self.net = members, net.to(members.device)
        matrices = _muons(net, config)
        if members.size > 1:
            _shard(net, members)
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
        self._aside: dict[str, Aside] | None = None

    def step(self, number: int) -> bool:
        """Takes optimiser step `number`, counted from 1; returns False if the gradient is not
        finite.

        The averages have a decay of min(average, n / (n + 9)), so at first they forget the start
        weights quickly.
        """
        if not math.isfinite(self.optimizer.step(number)):
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
        return {
            name: (one.full_tensor() if isinstance(one, DTensor) else one).cpu()
            for name, one in self._averages.items()
        }

    def local(self, *, gradients: bool = True) -> dict[str, Tensor]:
        """This rank's shards, live, by "model/<name>", "exp_avg/<name>", "gradient/<name>" and so
        on.
        """
        found = {f"model/{name}": value for name, value in self.net.state_dict().items()}
        for name, parameter in self.parameters.items():
            found |= {f"{key}/{name}": value for key, value in self.optimizer.moments(name).items()}
            if name in self._averages:
                found[f"average/{name}"] = self._averages[name]
            if gradients and parameter.grad is not None:
                found[f"gradient/{name}"] = parameter.grad
        return {key: shards.local_of(value) for key, value in found.items()}

    def numbers(self) -> dict[str, Tensor]:
        """The same, wherever the numbers are now; not to be written to."""
        if self._aside is not None:
            return {key: aside.copy for key, aside in self._aside.items()}
        return {key: value.detach() for key, value in self.local().items()}

    def zero_gradients(self) -> None:
        """Gives every parameter a gradient of zeros."""
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)

    def offload(self) -> None:
        """Leaves the device; no effect on a CPU."""
        if self._aside is None and self.members.device.type != "cpu":
            self._aside = lay_aside(self.local())
            give_back_cached()

    def to_device(self) -> None:
        """Returns to the device that `offload` left."""
        if self._aside is not None:
            bring_back(self.local(), self._aside)
            self._aside = None

    def state(self) -> dict[str, Any]:
        """Copies on the CPU, sharded as here: "model" and "average" by name, "optimizer" with
        "state" by name.
        """
        numbers, mesh = self.numbers(), self.members.cpu_mesh

        def copy(like: Tensor, key: str) -> Tensor:
            return checkpoints.copy_on_cpu(like, mesh, numbers=lambda _: numbers[key])

        model, averages = self.net.state_dict(), self._averages
        moments = {name: self.optimizer.moments(name) for name in self.parameters}
        return {
            "model": {name: copy(one, f"model/{name}") for name, one in model.items()},
            "average": {name: copy(one, f"average/{name}") for name, one in averages.items()},
            "optimizer": {
                "state": {
                    name: {key: copy(one, f"{key}/{name}") for key, one in own.items()}
                    for name, own in moments.items()
                }
            },
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a `state` of the same number of members.

        Raises DataLoss for the state of another drafter.
        """
        flat = {
            f"{part}/{name}": value
            for part in ("model", "average")
            for name, value in state[part].items()
        }
        for name, entry in state["optimizer"]["state"].items():
            flat |= {f"{key}/{name}": value for key, value in entry.items()}
        here = self.local(gradients=False)
        if flat.keys() != here.keys():
            raise DataLoss(
                "a state of another drafter", seen=sorted(flat)[:4], allowed=sorted(here)[:4]
            )
        for key, value in here.items():
            checkpoints.copy_local(flat[key], value)


def _shard(net: DraftNet, members: Members) -> None:
    for part in (*net.shards(), net):
        fully_shard(part, mesh=members.mesh)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _muons(net: DraftNet, config: DrafterOptimizerConfig) -> list[str]:
    """Names of the parameters that Muon moves."""
    return net.matrices() if config.kind == "muon" else []


def move(
    whole: DraftNet,
    config: DrafterOptimizerConfig,
    old: ShardedDrafter | None,
    new: ShardedDrafter | None,
    sizes: tuple[int, int],
    *,
    gradients: bool,
) -> None:
    """Moves all numbers from one membership to another, tensor by tensor, through rank 0.
    Collective over all ranks.

    `whole` is the unsharded drafter, for its shapes. `sizes` are the numbers of members before and
    after. `gradients`: whether to move a partial gradient.
    """
    source = {key: value.cpu() for key, value in old.numbers().items()} if old else {}
    if old and gradients:
        for name in old.parameters:
            source.setdefault(f"gradient/{name}", torch.zeros_like(source[f"model/{name}"]))
    if new and gradients:
        new.zero_gradients()
    target = new.local() if new else {}
    for key, shape in _layout(whole, config, gradients):
        _move_one(source.get(key), target.get(key), shape, sizes)


def _layout(
    whole: DraftNet, config: DrafterOptimizerConfig, gradients: bool
) -> Iterable[tuple[str, tuple[int, ...] | None]]:
    """Keys in an order common to all ranks, and the whole shape of each sharded tensor."""
    parameters, muons = dict(whole.named_parameters()), frozenset(_muons(whole, config))
    kept = [*(["average"] if config.average else []), *(["gradient"] if gradients else [])]
    for name, value in whole.state_dict().items():
        yield f"model/{name}", tuple(value.shape) if name in parameters else None
        if name in parameters and parameters[name].requires_grad:
            if name not in muons:
                yield f"step/{name}", None
            for kind in (*((optimizer.MOMENTUM,) if name in muons else optimizer.MOMENTS), *kept):
                yield f"{kind}/{name}", tuple(value.shape)


@torch.no_grad()
def _move_one(
    source: Tensor | None,
    target: Tensor | None,
    shape: tuple[int, ...] | None,
    sizes: tuple[int, int],
) -> None:
    rank, (before, after) = dist.get_rank(), sizes
    if rank == 0:
        assert source is not None
        assert target is not None
        whole = source if shape is None else _collect(source, shape, before)
        for other in reversed(range(after)):
            part = whole if shape is None else whole[shards.rows_of(shape[0], after, other)]
            if other == 0:
                target.copy_(part)
            elif part.numel():
                dist.send(part.contiguous(), other)
        return

    if source is not None and shape is not None and source.numel():
        dist.send(source.contiguous(), 0)
    if target is not None and target.numel():
        part = torch.empty(target.shape, dtype=target.dtype)
        dist.recv(part, 0)
        target.copy_(part)


def _collect(own: Tensor, shape: tuple[int, ...], members: int) -> Tensor:
    parts = [own]
    for other in range(1, members):
        rows = shards.rows_of(shape[0], members, other)
        part = torch.empty(rows.stop - rows.start, *shape[1:], dtype=own.dtype)
        if part.numel():
            dist.recv(part, other)
        parts.append(part)
    return torch.cat(parts)
