"""Places the ranks of one trainer, shards the policy over them (FSDP2) and gathers it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline.training.checkpoints import copy_local
from paceline.training.process import join_ranks
from policy_trainer.config import PolicyTrainerConfig
from policy_trainer.learn.model import PolicyModel, ValueModel

M = TypeVar("M", PolicyModel, ValueModel)


def form_mesh(config: PolicyTrainerConfig) -> DeviceMesh:
    """All ranks, each on its device."""
    device = config.device
    kind = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    join_ranks(kind, config.step_deadline_s, threads=config.threads_per_rank, seed=config.run.seed)
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("data",))


def shard(model: M, mesh: DeviceMesh, *, reshard_after_forward: bool) -> M:
    """Shards each decoder layer and then the rest over the mesh, in place (FSDP2, arXiv
    2304.11277).
    """
    model.to(mesh.device_type)
    for layer in model.layers():
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return model


def scatter_full(full: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Undoes gather_full: gives each tensor the numbers of rank 0's whole one."""
    for name, tensor in tensors:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        whole = full[name].to(tensor.device) if full else empty
        if isinstance(tensor, DTensor):
            whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
        copy_local(whole, tensor)


def gather_full(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors on the CPU of rank 0; the other ranks join the gathers and get an empty
    dict.
    """
    full: dict[str, Tensor] = {}
    for name, tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            full[name] = whole.detach().to("cpu", copy=True).contiguous()
    return full
