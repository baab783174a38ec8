"""Places the ranks of one trainer and shards the policy over them (FSDP2)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from paceline.errors import ConfigError
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.adapters import fill_adapters
from paceline.services.policy_trainer.learn.loading import StartWeights
from paceline.services.policy_trainer.learn.model import PolicyModel, ValueModel
from paceline.training.process import join_ranks

M = TypeVar("M", PolicyModel, ValueModel)
OnLoad = Callable[[int, int], None]
"""Called with the model bytes that this rank has read, and the bytes of the whole model."""


def loads_silently(read: int, of: int) -> None:
    """Reports nothing."""


def form_mesh(config: PolicyTrainerConfig) -> DeviceMesh:
    """Forms the mesh of all ranks, each on its device. Raises ConfigError for more
    ranks than GPUs.
    """
    kind = _kind_of(config.device)
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    join_ranks(kind, config.step_deadline_s, threads=config.threads_per_rank, seed=config.run.seed)
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("data",))


def _kind_of(device: str) -> str:
    """The kind of device. "auto" gives "cuda" if every rank has its own GPU, since NCCL rejects a
    GPU shared by two ranks; else "cpu". Raises ConfigError for "cuda" with more ranks than GPUs.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    gpus = torch.cuda.device_count()
    if device == "auto":
        return "cuda" if 0 < ranks <= gpus else "cpu"
    if device == "cuda" and ranks > gpus:
        raise ConfigError(
            "each rank of the policy computes on a GPU of its own; set policy_trainer.ranks",
            seen=f"{ranks} ranks on this host",
            allowed=f"at most {gpus}, the GPUs that it has",
        )
    return device


def shard(
    model: M, mesh: DeviceMesh, config: PolicyTrainerConfig, on_load: OnLoad = loads_silently
) -> M:
    """Loads each decoder layer, then the rest, from the start policy. Each unit is sharded over the
    mesh in place before the next one is loaded (FSDP2, arXiv 2304.11277).

    Shards, gradients and their sums over ranks are fp32. Gathered parameters and computation use
    `compute_dtype` (Micikevicius et al. 2018, arXiv 1710.03740). Raises as StartWeights.
    """
    start, names = StartWeights(Path(config.model)), model.names()
    dtype = getattr(torch, config.compute_dtype)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    read = 0
    for unit in (*model.layers(), model):
        new = sum(parameter.nbytes for parameter in unit.parameters() if parameter.is_meta)
        fill_adapters(unit, names, mesh.device_type, config.run.seed)
        start.fill(unit, names, mesh.device_type)
        unit.to(mesh.device_type)  # tensors that are in no file, such as buffers
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=config.reshard_after_forward,
            mp_policy=precision,
        )
        read += new
        on_load(read, whole)
    return model
