"""Builds the learner of a rank: the policy and the models that its algorithm needs."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import ConfigError
from paceline.services.policy_trainer.algorithm_settings import PpoConfig
from paceline.services.policy_trainer.algorithms import build_algorithm
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.adapters import StartPolicy, add_adapters
from paceline.services.policy_trainer.learn.critic import Critic
from paceline.services.policy_trainer.learn.learner import Learner
from paceline.services.policy_trainer.learn.loading import check_attention
from paceline.services.policy_trainer.learn.model import PolicyModel, critic_on_meta, policy_on_meta
from paceline.services.policy_trainer.learn.parallel import OnLoad, loads_silently, shard


def build_learner(
    config: PolicyTrainerConfig, mesh: DeviceMesh, on_load: OnLoad = loads_silently
) -> Learner:
    """Builds the learner, with the start policy as reference and a critic if they are needed.
    Collective.

    Raises ConfigError for: a directory without a model; an attention or head kernel that cannot
    train here; adapters without peft; 8-bit moments without torchao; a user's algorithm that needs
    a critic without settings for it.
    """
    check_attention(config.attention, mesh.device_type)
    check_head(config, mesh.device_type)
    needs = build_algorithm(config.algorithm).needs()
    policy = _policy(config, mesh, on_load, frozen=False)
    reference: PolicyModel | StartPolicy | None = None
    if needs.reference:
        adapted = config.adapters.rank > 0
        reference = StartPolicy(policy) if adapted else _policy(config, mesh, on_load, frozen=True)
    critic = _critic(config, mesh, on_load) if needs.values else None
    return Learner(config, policy, mesh, reference, critic)


def _policy(
    config: PolicyTrainerConfig, mesh: DeviceMesh, on_load: OnLoad, *, frozen: bool
) -> PolicyModel:
    model = policy_on_meta(
        Path(config.model),
        recompute=config.recompute_activations and not frozen,
        chunk_rows=config.head_rows,
        head_kernel=config.head_kernel,
        attention=config.attention,
    )
    model.requires_grad_(not frozen)
    if config.adapters.rank and not frozen:
        add_adapters(model, config.adapters)
    return shard(model, mesh, config, on_load)


def _critic(config: PolicyTrainerConfig, mesh: DeviceMesh, on_load: OnLoad) -> Critic:
    settings = config.algorithm
    if not isinstance(settings, PpoConfig):
        raise ConfigError(
            "an algorithm of your own cannot have a critic", seen=settings.name, allowed="ppo"
        )
    model = critic_on_meta(Path(config.model), attention=config.attention)
    return Critic(config, settings, shard(model, mesh, config, on_load), mesh)


def check_head(config: PolicyTrainerConfig, device: str) -> None:
    """Raises ConfigError for a head kernel that cannot train with these settings."""
    seen = f"policy_trainer.head_kernel={config.head_kernel}"
    wanted = os.environ.get("CXX", "g++")
    if config.head_kernel == "compiled" and device == "cpu" and shutil.which(wanted) is None:
        raise ConfigError(
            "on a CPU a compiled head needs a C++ compiler",
            seen=f"{seen}, no {wanted} on PATH",
            allowed="head_kernel=torch, or a compiler that $CXX names",
        )
    if config.head_kernel != "cut_cross_entropy":
        return

    if device != "cuda" or config.compute_dtype != "bfloat16":
        raise ConfigError(
            "cut cross-entropy computes on CUDA and in bfloat16",
            seen=f"{seen} on {device}, compute_dtype={config.compute_dtype}",
            allowed="head_kernel=torch or compiled elsewhere",
        )
    if config.algorithm.entropy_coefficient:
        raise ConfigError(
            "cut cross-entropy has no gradient of the entropy",
            seen=f"{seen}, algorithm.entropy_coefficient={config.algorithm.entropy_coefficient}",
            allowed="algorithm.entropy_coefficient=0, or head_kernel=torch or compiled",
        )
    if find_spec("cut_cross_entropy") is None:
        raise ConfigError(
            "the kernel is not installed: pip install 'paceline[cut]'",
            seen=seen,
            allowed="head_kernel=torch or compiled without it",
        )
