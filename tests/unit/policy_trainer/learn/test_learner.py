"""The learner on one in-process rank: warm-up, several updates, exact resume from a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM
from unit.policy_trainer.sharded_step import trajectories

from paceline.config import OptimizerConfig, RunConfig
from paceline.errors import ConfigError, DataLoss
from paceline.file_hashes import write_hashes
from paceline.ranks.messages import Save
from paceline.training import STORE_VARIABLE
from policy_trainer.batches.batch import TrainBatch, make_batch
from policy_trainer.config import AlgorithmConfig, PolicyTrainerConfig
from policy_trainer.learn.learner import Learner
from policy_trainer.learn.model import load_policy
from policy_trainer.learn.parallel import form_mesh, shard
from policy_trainer.messages import BatchFacts, Progress
from policy_trainer.trainer import PolicyTrainer


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RANK": 0,
            "WORLD_SIZE": 1,
            "LOCAL_RANK": 0,
            STORE_VARIABLE: tmp_path_factory.mktemp("ranks") / "store",
        }.items():
            patch.setenv(name, str(value))
        yield form_mesh(PolicyTrainerConfig(device="cpu"))
        dist.destroy_process_group()


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=request.param,
        initializer_range=0.2,
    )
    directory = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def learner(model: Path, mesh: DeviceMesh, **settings: object) -> Learner:
    config = PolicyTrainerConfig.model_validate(
        {"optimizer": OptimizerConfig(lr=1e-3, warmup_steps=3), **settings}
    )
    return Learner(config, shard(load_policy(model), mesh, reshard_after_forward=False), mesh)


def trainer(one: Learner, model: Path, run: Path) -> PolicyTrainer:
    """Without what only rank 0 does: no Redis, no pushes."""
    config = PolicyTrainerConfig(model=str(model), run=RunConfig(dir=str(run)))
    return PolicyTrainer(config, one, None)


def batch(step: int) -> TrainBatch:
    draw = torch.Generator().manual_seed(step)
    return make_batch(trajectories(), torch.randn(24, generator=draw))


def test_two_steps_a_checkpoint_and_two_steps_are_four_steps_bit_for_bit(
    model_dir: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    straight, first = learner(model_dir, mesh), learner(model_dir, mesh)
    for step in range(4):
        straight.step(batch(step))
    first.step(batch(0))
    first.step(batch(1))
    writing = trainer(first, model_dir, tmp_path)
    writing.progress = Progress(
        policy_version=2, step=1, trajectories_trained=48, batch=BatchFacts(tokens=5)
    )
    writing.handle(Save(1))
    directory = tmp_path / "checkpoints" / "policy" / "step-2"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in directory.iterdir()
    }
    served = load_policy(directory).state_dict()
    for name, weight in first.weights().items():
        assert torch.equal(served[f"lm.{name}"], weight), name

    resumed = learner(model_dir, mesh)
    resuming = trainer(resumed, model_dir, tmp_path)
    resuming.resume()
    assert resuming.progress == dataclasses.replace(writing.progress, checkpoint_version=2)
    resumed.step(batch(2))
    resumed.step(batch(3))
    expected = straight.weights()
    for name, weight in resumed.weights().items():
        assert torch.equal(weight, expected[name]), name


def test_a_checkpoint_of_another_trainer_is_data_loss(
    model_dir: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    writing = trainer(learner(model_dir, mesh), model_dir, tmp_path)
    writing.handle(Save(1))
    described = tmp_path / "checkpoints" / "policy" / "step-0" / "state.json"
    state = json.loads(described.read_text())
    del state["progress"]
    described.write_text(json.dumps(state))
    write_hashes(described.parent)
    with pytest.raises(DataLoss, match="step-0"):
        trainer(learner(model_dir, mesh), model_dir, tmp_path).resume()


def test_the_rate_warms_up_and_a_second_update_sees_ratios_away_from_one(
    model_dir: Path, mesh: DeviceMesh
) -> None:
    once = learner(model_dir, mesh)
    twice = learner(model_dir, mesh, algorithm=AlgorithmConfig(updates_per_step=2))
    first, second = once.step(batch(0)), twice.step(batch(0))
    assert once.optimizer.adamw.param_groups[0]["lr"] == pytest.approx(1e-3 / 3)
    assert twice.optimizer.adamw.param_groups[0]["lr"] == pytest.approx(2e-3 / 3)
    assert first.loss == second.loss
    assert first.clip_fraction == 0.0
    weights = once.weights()
    assert any(not torch.equal(weight, weights[name]) for name, weight in twice.weights().items())


def test_a_batch_without_advantage_leaves_the_weights_alone(
    model_dir: Path, mesh: DeviceMesh
) -> None:
    still = learner(model_dir, mesh)
    before = still.weights()
    figures = still.step(make_batch(trajectories(), torch.zeros(24)))
    assert (figures.loss, figures.grad_norm) == (0.0, 0.0)
    assert all(torch.equal(weight, before[name]) for name, weight in still.weights().items())


@pytest.mark.parametrize(
    ("part", "value"),
    [("behavior_logprobs", math.nan), ("behavior_logprobs", math.inf), ("advantages", math.inf)],
)
def test_an_update_whose_numbers_are_not_finite_is_not_taken_and_the_next_one_is(
    model_dir: Path, mesh: DeviceMesh, part: str, value: float
) -> None:
    capped = AlgorithmConfig(behavior_cap=2.0)
    one, other = (learner(model_dir, mesh, algorithm=capped) for _ in range(2))
    before = one.weights()
    broken = batch(0)
    getattr(broken, part)[-1] = value
    figures = one.step(broken)
    assert (figures.skipped_updates, figures.grad_norm) == (1, 0.0)
    assert all(math.isfinite(value) for value in dataclasses.astuple(figures))
    assert all(torch.equal(weight, before[name]) for name, weight in one.weights().items())
    assert one.step(batch(1)).skipped_updates == other.step(batch(1)).skipped_updates == 0
    expected = other.weights()
    for name, weight in one.weights().items():
        assert torch.equal(weight, expected[name]), name


def test_a_gradient_that_is_not_finite_is_not_taken_where_the_loss_is(
    model_dir: Path, mesh: DeviceMesh
) -> None:
    one = learner(model_dir, mesh)
    before = one.weights()
    one.model.lm.model.norm.register_full_backward_hook(
        lambda module, inwards, outwards: tuple(gradient * math.inf for gradient in inwards)
    )
    figures = one.step(batch(0))
    assert (figures.skipped_updates, figures.grad_norm) == (1, 0.0)
    assert figures.loss != 0.0
    assert all(torch.equal(weight, before[name]) for name, weight in one.weights().items())


def test_a_directory_without_a_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_policy(tmp_path)
