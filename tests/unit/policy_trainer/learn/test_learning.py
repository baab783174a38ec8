"""Whether algorithms learn: a tiny policy that is to count on from its prompt, sampled and trained in
this process, also by weights that are several versions old.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM
from unit.policy_trainer.sharded_step import whole

from paceline.services.policy_trainer.batches.batch import make_batch
from paceline.services.policy_trainer.config import PolicyOptimizerConfig, PolicyTrainerConfig
from paceline.services.policy_trainer.learn.build import build_learner
from paceline.trajectory import BranchKey, Trajectory, VersionSpan

pytestmark = pytest.mark.slow

VOCABULARY, PROMPT, REPLY = 12, 1, 4
GROUPS, SAMPLES, STEPS = 12, 8, 60
LEARNED = 0.6
"""Mean reward; chance is 0.08. Some keep to a few wrong tokens, as tiny policies do."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    directory = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@torch.no_grad()
def sampled(
    lm: LlamaForCausalLM, step: int, version: int, draw: torch.Generator
) -> list[Trajectory]:
    """GROUPS prompts with SAMPLES replies each; the reward is the share of tokens that are one
    more than the one before.
    """
    prompts = torch.randint(0, VOCABULARY, (GROUPS, PROMPT), generator=draw)
    ids = prompts.repeat_interleave(SAMPLES, 0)
    logprobs: list[Tensor] = []
    for _ in range(REPLY):
        chances = lm(ids).logits[:, -1].log_softmax(-1)
        drawn = torch.multinomial(chances.exp(), 1, generator=draw)
        logprobs.append(chances.gather(-1, drawn))
        ids = torch.cat([ids, drawn], 1)
    behavior = torch.cat(logprobs, 1)
    rewards = (ids[:, PROMPT:] == (ids[:, PROMPT - 1 : -1] + 1) % VOCABULARY).float().mean(1)
    return [
        Trajectory(
            key=BranchKey("r", f"{step}.{i}"),
            step=step,
            task_id=str(i // SAMPLES),
            group_id=f"{step}.{i // SAMPLES}",
            group_size=SAMPLES,
            task_index=i // SAMPLES,
            sample_index=i % SAMPLES,
            token_ids=tuple(ids[i].tolist()),
            loss_mask=(0,) * PROMPT + (1,) * REPLY,
            behavior_logprobs=(0.0,) * PROMPT + tuple(behavior[i].tolist()),
            version_spans=(VersionSpan(PROMPT, PROMPT + REPLY, version),),
            reward=float(rewards[i]),
            seed=i,
            temperature=1.0,
        )
        for i in range(len(ids))
    ]


def learned(
    model: Path,
    mesh: DeviceMesh,
    algorithm: dict[str, Any],
    *,
    seed: int,
    lag: int = 0,
    lr: float = 1e-2,
) -> float:
    """Return the mean reward of the last five steps on samples from weights `lag` versions old."""
    config = PolicyTrainerConfig.model_validate(
        {
            "model": str(model),
            "algorithm": algorithm,
            "optimizer": PolicyOptimizerConfig(lr=lr, warmup_steps=1),
            "row_tokens": 64,
        }
    )
    learner = build_learner(config, mesh)
    sampler = LlamaForCausalLM.from_pretrained(model)
    draw = torch.Generator().manual_seed(seed)
    versions = [whole(learner.weights.published())]
    rewards = []
    for step in range(STEPS):
        version = max(0, step - lag)
        sampler.load_state_dict(versions[version])
        batch = sampled(sampler, step, version, draw)
        rewards.append(sum(one.reward or 0.0 for one in batch) / len(batch))
        learner.step(make_batch(batch, step), step)
        versions.append(whole(learner.weights.published()))
    return sum(rewards[-5:]) / 5


LEARNERS: list[dict[str, Any]] = [
    {"name": "grpo"},
    {"name": "dr_grpo"},
    {"name": "rloo"},
    {"name": "reinforce_plus_plus_baseline"},
    {"name": "ppo", "critic_lr": 3e-3, "gae_lambda": 0.95},
    {"name": "gspo", "mini_batches": 2, "clip_low": 0.1, "clip_high": 0.1},
    {"name": "cispo", "passes": 2},
]


@pytest.mark.parametrize("algorithm", LEARNERS, ids=lambda one: one["name"])
def test_it_learns_with_three_seeds(
    model_dir: Path, mesh: DeviceMesh, algorithm: dict[str, Any]
) -> None:
    found = [learned(model_dir, mesh, algorithm, seed=seed) for seed in range(3)]
    print(algorithm["name"], [round(one, 3) for one in found])
    assert min(found) > LEARNED


def test_decoupled_learns_from_tokens_that_are_four_versions_old(
    model_dir: Path, mesh: DeviceMesh
) -> None:
    found = [learned(model_dir, mesh, {"name": "decoupled"}, seed=seed, lag=4) for seed in range(3)]
    print("decoupled, lag 4", [round(one, 3) for one in found])
    assert min(found) > LEARNED


def test_eight_versions_late_it_does_worse_without_the_correction(
    model_dir: Path, mesh: DeviceMesh
) -> None:
    found = {
        name: [learned(model_dir, mesh, {"name": name}, seed=seed, lag=8) for seed in range(3)]
        for name in ("grpo", "decoupled")
    }
    print({name: [round(one, 3) for one in each] for name, each in found.items()})
    assert min(found["decoupled"]) > max(found["grpo"]) + 0.05
