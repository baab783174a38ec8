"""Builds the learner of a rank: the policy, and what its algorithm needs beside it."""

from __future__ import annotations

import os
import shutil
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
from paceline.services.policy_trainer.learn.parallel import shard


def build_learner(config: PolicyTrainerConfig, mesh: DeviceMesh) -> Learner:
    """With the start policy as its reference and a critic, where they are needed. Collective.

    Raises ConfigError for a directory without a model, an attention that cannot train here, a
    compiled head without a compiler, adapters without peft, moments of eight bits without torchao,
    and an algorithm of your own that needs a critic and has no settings for one.
    """
    check_attention(config.attention, mesh.device_type)
    if config.head_compiled and mesh.device_type == "cpu":
        _check_compiler()
    needs = build_algorithm(config.algorithm).needs()
    policy = _policy(config, mesh, frozen=False)
    reference: PolicyModel | StartPolicy | None = None
    if needs.reference:
        adapted = config.adapters.rank > 0
        reference = StartPolicy(policy) if adapted else _policy(config, mesh, frozen=True)
    critic = _critic(config, mesh) if needs.values else None
    return Learner(config, policy, mesh, reference, critic)


def _policy(config: PolicyTrainerConfig, mesh: DeviceMesh, *, frozen: bool) -> PolicyModel:
    model = policy_on_meta(
        Path(config.model),
        recompute=config.recompute_activations and not frozen,
        chunk_rows=config.head_rows,
        compiled=config.head_compiled,
        attention=config.attention,
    )
    model.requires_grad_(not frozen)
    if config.adapters.rank and not frozen:
        add_adapters(model, config.adapters)
    return shard(model, mesh, config)


def _critic(config: PolicyTrainerConfig, mesh: DeviceMesh) -> Critic:
    settings = config.algorithm
    if not isinstance(settings, PpoConfig):
        raise ConfigError(
            "an algorithm of your own cannot have a critic", seen=settings.name, allowed="ppo"
        )
    model = critic_on_meta(Path(config.model), attention=config.attention)
    return Critic(config, settings, shard(model, mesh, config), mesh)


def _check_compiler() -> None:
    wanted = os.environ.get("CXX", "g++")
    if shutil.which(wanted) is None:
        raise ConfigError(
            "on a CPU a compiled head needs a C++ compiler",
            seen=f"policy_trainer.head_compiled=true, no {wanted} on PATH",
            allowed="head_compiled=false, or a compiler that $CXX names",
        )
