"""Shards a drafter, its averaged weights and its optimiser over the members (FSDP2), and moves all
of it to other members.
"""

import math
from collections.abc import Mapping
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
        return {key: self._copy(key, one) for key, one in live.items()}

    def _copy(self, key: str, live: Tensor) -> Tensor:
        aside = None if self._aside is None else self._aside[key].copy
        return checkpoints.copy_on_cpu(
            live,
            self.members.cpu_mesh,
            numbers=lambda one: shards.local_of(one) if aside is None else aside,
        )

    def local(self) -> dict[str, Tensor]:
        """This rank's part of the numbers and of partial gradients, live."""
        live = self.named() | self.gradients()
        return {key: shards.local_of(value.detach()) for key, value in live.items()}

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

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores `copies` of `named` from the same number of members, nested by the parts of
        their names. Raises DataLoss for the state of another drafter.
        """
        found, here = dict(shards.tensors_of(state)), self.named()
        if found.keys() != here.keys():
            raise DataLoss(
                "a state of another drafter", seen=sorted(found)[:4], allowed=sorted(here)[:4]
            )
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
        if new.members.size > 1:
            dist.broadcast(whole, 0, group=new.members.group)
        shards.local_of(target).copy_(shards.local_rows(whole, target))
