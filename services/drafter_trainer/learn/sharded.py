"""Shards a drafter and its optimiser over the members (FSDP2), and moves them to other members."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from paceline.config import OptimizerConfig
from paceline.errors import DataLoss
from paceline.services.drafter_trainer.learn.membership import Members
from paceline.speculators.net import DraftNet
from paceline.training.checkpoints import copy_local, sharded_like
from paceline.training.offload import Aside, bring_back, lay_aside
from paceline.training.optimizer import MOMENTS, NamedAdamW
from paceline.training.shards import local_of, rows_of


class ShardedDrafter:
    """Network and AdamW over the members' ranks; only they have one. Starts on the device, with
    zero moments.

    Gradients are sums over the members' losses, not means. One member alone has it whole: FSDP2
    around a network this small costs a third of a step.
    """

    def __init__(self, net: DraftNet, config: OptimizerConfig, members: Members) -> None:
        self.members, self.net = members, net.to(members.device)
        if members.size > 1:
            _shard(net, members)
        self.parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
        self.optimizer = NamedAdamW(self.parameters, config)
        self._aside: dict[str, Aside] | None = None

    def local(self, *, gradients: bool = True) -> dict[str, Tensor]:
        """This rank's shards, live, by "model/<name>", "exp_avg/<name>", "gradient/<name>" and so
        on.
        """
        found = {f"model/{name}": value for name, value in self.net.state_dict().items()}
        for name, parameter in self.parameters.items():
            found |= {f"{key}/{name}": value for key, value in self.optimizer.moments(name).items()}
            if gradients and parameter.grad is not None:
                found[f"gradient/{name}"] = parameter.grad
        return {key: local_of(value) for key, value in found.items()}

    def local_on_cpu(self) -> dict[str, Tensor]:
        """The same on the CPU, wherever the numbers are now; not to be written to."""
        if self._aside is not None:
            return {key: aside.copy for key, aside in self._aside.items()}
        return {key: value.detach().cpu() for key, value in self.local().items()}

    def zero_gradients(self) -> None:
        """Gives every parameter a gradient of zeros."""
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)

    def offload(self) -> None:
        """Leaves the device; nothing happens on a CPU."""
        if self._aside is None and self.members.device.type != "cpu":
            self._aside = lay_aside(self.local())
            torch.cuda.empty_cache()

    def to_device(self) -> None:
        """Comes back to where `offload` left."""
        if self._aside is not None:
            bring_back(self.local(), self._aside)
            self._aside = None

    def state(self) -> dict[str, Any]:
        """Copies on the CPU, sharded as they are here: "model" by name, "optimizer" with "state" by
        name.
        """
        on_device = self._aside is None and self.members.device.type != "cpu"
        copies = {
            key: value if on_device else value.clone() for key, value in self.local_on_cpu().items()
        }
        mesh = self.members.cpu_mesh
        model = {
            name: sharded_like(value, copies[f"model/{name}"], mesh)
            for name, value in self.net.state_dict().items()
        }
        optimizer = {
            name: {
                key: sharded_like(value, copies[f"{key}/{name}"], mesh)
                for key, value in self.optimizer.moments(name).items()
            }
            for name in self.parameters
        }
        return {"model": model, "optimizer": {"state": optimizer}}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes the numbers of a `state` of as many members.

        Raises DataLoss when it is of another drafter.
        """
        flat = {f"model/{name}": value for name, value in state["model"].items()}
        for name, entry in state["optimizer"]["state"].items():
            flat |= {f"{key}/{name}": value for key, value in entry.items()}
        here = self.local(gradients=False)
        if flat.keys() != here.keys():
            raise DataLoss(
                "a state of another drafter", seen=sorted(flat)[:4], allowed=sorted(here)[:4]
            )
        for key, value in here.items():
            copy_local(flat[key], value)


def _shard(net: DraftNet, members: Members) -> None:
    for part in (*net.shards(), net):
        fully_shard(part, mesh=members.mesh)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def move(
    whole: nn.Module,
    old: ShardedDrafter | None,
    new: ShardedDrafter | None,
    sizes: tuple[int, int],
    *,
    gradients: bool,
) -> None:
    """Carries all numbers from one membership to another, tensor by tensor, over rank 0; a
    collective of all ranks.

    `whole` is the drafter unsharded, for its shapes; `sizes` are the members before and after;
    `gradients` says whether a partial gradient is to be carried.
    """
    source = old.local_on_cpu() if old else {}
    if old and gradients:
        for name in old.parameters:
            source.setdefault(f"gradient/{name}", torch.zeros_like(source[f"model/{name}"]))
    if new and gradients:
        new.zero_gradients()
    target = new.local() if new else {}
    for key, shape in _layout(whole, gradients):
        _move_one(source.get(key), target.get(key), shape, sizes)


def _layout(whole: nn.Module, gradients: bool) -> Iterable[tuple[str, tuple[int, ...] | None]]:
    """Keys in an order that all ranks share, and the whole shape of what is sharded."""
    parameters = dict(whole.named_parameters())
    kinds = (*MOMENTS, *(("gradient",) if gradients else ()))
    for name, value in whole.state_dict().items():
        yield f"model/{name}", tuple(value.shape) if name in parameters else None
        if name in parameters and parameters[name].requires_grad:
            yield f"step/{name}", None
            for kind in kinds:
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
            part = whole if shape is None else whole[rows_of(shape[0], after, other)]
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
        rows = rows_of(shape[0], members, other)
        part = torch.empty(rows.stop - rows.start, *shape[1:], dtype=own.dtype)
        if part.numel():
            dist.recv(part, other)
        parts.append(part)
    return torch.cat(parts)
