"""The drafter's learner on CUDA: it learns the same as on a CPU, and frees its memory when it
leaves.

Prints figures.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from live_memory import device_bytes
from unit.drafter_trainer.samples import TARGET, sample, toy_policy

from paceline.models.config import ModelConfig
from paceline.services.drafter_trainer.config import DrafterOptimizerConfig
from paceline.services.drafter_trainer.learn.learner import DrafterLearner
from paceline.services.drafter_trainer.learn.membership import Membership, on_cpu
from paceline.services.drafter_trainer.rows.sample import pack
from paceline.speculators.eagle import EagleNet
from paceline.training.checkpoints import CheckpointWriter, read_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]
ROWS = [pack([sample(12 + i, i)], window=512) for i in range(8)]
HEAD = toy_policy().policy_head()
LARGE = ModelConfig(
    family="llama",
    vocab_size=32_000,
    hidden_size=4_096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_position_embeddings=8_192,
)


@pytest.fixture
def one_gpu() -> Iterator[None]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def learner(target: ModelConfig = TARGET) -> DrafterLearner:
    config = DrafterOptimizerConfig(lr=1e-2, warmup_steps=2)
    return DrafterLearner(EagleNet(target, seed=1), config, micro_batches=2, members=on_cpu(1))


def weights(one: DrafterLearner) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in one.snapshot().state_dict().items()}


def test_a_learner_that_comes_and_goes_learns_what_it_learns_on_a_cpu(tmp_path: Path) -> None:
    on_host, moved, membership = learner(), learner(), Membership("cuda")
    for row in ROWS:
        on_host.micro_step(row, HEAD)
        moved.attach(membership.join([0]))
        moved.micro_step(row, HEAD)
        moved.offload()
    writer = CheckpointWriter(tmp_path, lambda state, directory: None)
    writer.write(moved.state(), 1, moved.members.writing)  # without the device
    writer.wait()
    loaded = learner()
    loaded.load_state(read_checkpoint(tmp_path / "checkpoint-1", loaded.state()))
    assert loaded.total_steps == on_host.total_steps == 4
    expected = weights(on_host)
    for name, value in weights(loaded).items():
        assert (value - expected[name]).norm() < 1e-4 * expected[name].norm(), name
    moved.attach(membership.members)
    assert all(torch.equal(value, weights(loaded)[name]) for name, value in weights(moved).items())


def test_a_large_drafter_leaves_the_memory_and_is_back_in_measured_time() -> None:
    one, membership = learner(LARGE), Membership("cuda")
    began = time.perf_counter()
    one.attach(membership.join([0]))
    first, held = time.perf_counter() - began, torch.cuda.memory_allocated()
    in_use = device_bytes()[1]
    for _ in range(2):
        attached = time.perf_counter()
        one.offload()
        left = time.perf_counter()
        allocated, still_in_use = device_bytes()
        assert allocated < 0.01 * held  # cuBLAS's workspaces too
        assert in_use - still_in_use > 0.8 * held
        one.attach(membership.members)
        sys.stdout.write(
            f"{held / 2**20:.0f} MB: first attach {first:.2f} s, offload {left - attached:.2f} s, "
            f"attach {time.perf_counter() - left:.2f} s\n"
        )
        assert torch.cuda.memory_allocated() == held
