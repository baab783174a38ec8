"""One rank of the tests of the trainer's memory: bytes at the moments that matter, written by each
rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from live_memory import live_bytes, storage_bytes
from torch import Tensor
from torch.distributed.tensor import DTensor
from unit.policy_trainer.sharded_step import trajectories

from paceline.services.policy_trainer.batches.batch import make_batch
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.build import build_learner, form_mesh
from paceline.services.policy_trainer.learn.learner import Learner
from paceline.services.policy_trainer.messages import Train, Wanted
from paceline.services.policy_trainer.trainer import PolicyTrainer


def kept(learner: Learner) -> list[Tensor]:
    """Shards and moments of all models of this rank."""
    critic = learner.critic
    models = [learner.model, learner.reference, critic.model if critic else None]
    tensors = [one for model in models if model is not None for one in model.parameters()]
    for optimizer in (learner.optimizer, *([critic.optimizer] if critic else ())):
        for name in optimizer.parameters:
            tensors += optimizer.moments(name).values()
    return tensors


def record_within_a_step(learner: Learner, found: dict[str, int]) -> None:
    """Records bytes when the last layer has computed, and when the second micro-batch begins."""
    layers = list(learner.model.layers())
    found["layer"] = storage_bytes(layers[0].parameters()) * dist.get_world_size()

    def computed(*_: object) -> None:
        weights = [one for layer in layers[:-1] for one in layer.parameters()]
        gathered = storage_bytes(one for one in weights if not isinstance(one, DTensor))
        found.setdefault("gathered", gathered)
        found.setdefault("live after the forward", live_bytes())

    def begins(number: int, of: int) -> None:
        if number == 2:
            found.setdefault("live before the second micro-batch", live_bytes())

    layers[-1].register_forward_hook(computed)
    learner.on_micro_batch = begins


def main(model: Path, out: Path, given: Mapping[str, Any]) -> None:
    """Starts, rests, and takes two steps, each followed by a rest."""
    settings = {
        "model": str(model),
        "device": "cpu",
        "run": {"dir": str(out / "run")},
        "tokens_per_micro_batch": 192,
        "row_tokens": 64,
        "optimizer": {"lr": 1e-3},
        **given,
    }
    config = PolicyTrainerConfig.model_validate(settings)
    learner = build_learner(config, form_mesh(config))
    found = {"kept": storage_bytes(kept(learner)), "live": live_bytes()}
    trainer = PolicyTrainer(config, learner, None)
    record_within_a_step(learner, found)
    trainer.resume()
    found["kept at the start"] = storage_bytes(kept(learner))
    nothing = Train(Wanted(0, 0, (), 0.0), "{}")
    for step in (1, 2):
        learner.memory.enter()
        found[f"kept in step {step}"] = storage_bytes(kept(learner))
        learner.step(make_batch(trajectories(), 4), step)
        trainer.handle(nothing)  # without a batch: the ranks come to the device and leave it
        found[f"kept after step {step}"] = storage_bytes(kept(learner))
        found[f"live after step {step}"] = live_bytes()
    (out / f"memory-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
