"""Builds the learner of a rank: sharded models that are loaded unit by unit."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from paceline.errors import ConfigError
from paceline.services.policy_trainer import algorithm_settings, algorithms
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn import learner, weights
from paceline.services.policy_trainer.learn import model as models
from paceline.services.policy_trainer.learn.objective import Critic
from paceline.training.process import join_ranks

M = TypeVar("M", models.PolicyModel, models.ValueModel)
OnLoad = Callable[[int, int], None]
"""Called with the model bytes that this rank has read, and the bytes of the whole model."""


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
        message = "each rank of the policy needs its own GPU; set policy_trainer.ranks"
        raise ConfigError(message, seen=f"{ranks} ranks", allowed=f"at most {gpus}, the GPUs here")
    return device


def shard(
    model: M, mesh: DeviceMesh, config: PolicyTrainerConfig, on_load: OnLoad = lambda read, of: None
) -> M:
    """Loads each decoder layer, then the rest, from the start policy. Each unit is sharded over the
    mesh in place before the next one is loaded (FSDP2, arXiv 2304.11277).

    Shards, gradients and their sums over ranks are fp32. Gathered parameters and computation use
    `compute_dtype` (Micikevicius et al. 2018, arXiv 1710.03740). Raises as StartWeights.
    """
    start, names = models.StartWeights(Path(config.model)), model.names()
    dtype = getattr(torch, config.compute_dtype)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    read = 0
    for unit in (*model.layers(), model):
        new = sum(parameter.nbytes for parameter in unit.parameters() if parameter.is_meta)
        weights.fill_adapters(unit, names, mesh.device_type, config.run.seed)
        start.fill(unit, names, mesh.device_type)
        unit.to(mesh.device_type)  # tensors that are in no file, such as buffers
        fully_shard(
            unit, mesh=mesh, reshard_after_forward=config.reshard_after_forward, mp_policy=precision
        )
        read += new
        on_load(read, whole)
    return model


def build_learner(
    config: PolicyTrainerConfig, mesh: DeviceMesh, on_load: OnLoad = lambda read, of: None
) -> learner.Learner:
    """Builds the learner, with the start policy as reference and a critic if they are needed.
    Collective.

    Raises ConfigError for: a directory without a model; an attention kernel that cannot train here;
    adapters without peft; 8-bit moments without torchao; a user's algorithm that needs a critic
    without settings for it.
    """
    models.check_attention(config.attention, mesh.device_type)
    needs = algorithms.build_algorithm(config.algorithm).needs()
    policy = _policy(config, mesh, on_load, frozen=False)
    reference: models.PolicyModel | weights.StartPolicy | None = None
    if needs.reference:
        adapted = config.adapters.rank > 0
        reference = (
            weights.StartPolicy(policy) if adapted else _policy(config, mesh, on_load, frozen=True)
        )
    critic = _critic(config, mesh, on_load) if needs.values else None
    return learner.Learner(config, policy, mesh, reference, critic)


def _policy(
    config: PolicyTrainerConfig, mesh: DeviceMesh, on_load: OnLoad, *, frozen: bool
) -> models.PolicyModel:
    model = models.policy_on_meta(
        Path(config.model),
        recompute=config.recompute_activations and not frozen,
        chunk_rows=config.head_rows,
        attention=config.attention,
    )
    model.requires_grad_(not frozen)
    if config.adapters.rank and not frozen:
        weights.add_adapters(model, config.adapters)
    return shard(model, mesh, config, on_load)


def _critic(config: PolicyTrainerConfig, mesh: DeviceMesh, on_load: OnLoad) -> Critic:
    settings = config.algorithm
    if not isinstance(settings, algorithm_settings.PpoConfig):
        message = "an algorithm of your own cannot have a critic"
        raise ConfigError(message, seen=settings.name, allowed="ppo")
    decoder = models.causal_lm_on_meta(Path(config.model), config.attention).model
    model = models.ValueModel(decoder)
    return Critic(config, settings, shard(model, mesh, config, on_load), mesh)
