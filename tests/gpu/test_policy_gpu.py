"""The policy's step on a GPU: with memory savings it equals the CPU's step, and memory is freed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from live_memory import device_bytes
from random_models import save_random
from torch.distributed.device_mesh import DeviceMesh
from unit.policy_trainer.sharded_step import trajectories, whole

from paceline.services.policy_trainer.batches.batch import make_batch
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.build import build_learner, form_mesh
from paceline.services.policy_trainer.learn.learner import Learner
from paceline.training import STORE_VARIABLE
from paceline.training.offload import give_back_cached

pytestmark = pytest.mark.gpu
SHAPE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
WAYS = {
    "plain": {},
    "flex": {"attention": "flex", "row_tokens": 256},
    "moments": {"optimizer": {"lr": 1e-3, "moments": "int8"}},
    "offload": {"offload": True},
}


@pytest.fixture
def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    places = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, STORE_VARIABLE: tmp_path / "store"}
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    yield form_mesh(PolicyTrainerConfig(device="cuda"))
    dist.destroy_process_group()


def learner(model: Path, mesh: DeviceMesh, **settings: object) -> Learner:
    given = {"model": str(model), "optimizer": {"lr": 1e-3}, **settings}
    return build_learner(PolicyTrainerConfig.model_validate(given), mesh)


@pytest.mark.parametrize("way", WAYS)
def test_three_steps_go_where_the_cpu_goes(tmp_path: Path, mesh: DeviceMesh, way: str) -> None:
    save_random(tmp_path / "model", "llama", **SHAPE, **HEADS)
    cpu = DeviceMesh.from_group(mesh.get_group(), "cpu")
    one, other = learner(tmp_path / "model", cpu), learner(tmp_path / "model", mesh, **WAYS[way])
    for _ in range(3):
        batch = make_batch(trajectories(vocabulary=512), 4)
        expected, found = one.step(batch).figures, other.step(batch).figures
        assert found["entropy"] == pytest.approx(expected["entropy"], rel=1e-3)
        if other.config.offload:
            give_back_cached()
            held = torch.cuda.memory_allocated()
            other.memory.leave()
            assert torch.cuda.memory_allocated() < held / 2
            other.memory.enter()
    wanted = whole(one.weights.published())
    for name, weight in whole(other.weights.published()).items():
        assert torch.allclose(weight, wanted[name], atol=4e-3), name  # three steps of 1e-3


def test_offload_gives_the_device_the_bytes_of_weights_and_moments(
    tmp_path: Path, mesh: DeviceMesh
) -> None:
    """Measured in the allocator and in the driver's free memory."""
    large = {"vocab_size": 8_192, "hidden_size": 1_024, "intermediate_size": 4_096}
    save_random(tmp_path / "model", "llama", num_hidden_layers=4, **HEADS, **large)
    one = learner(tmp_path / "model", mesh, offload=True)
    one.step(make_batch(trajectories(vocabulary=512), 4))
    kept = 3 * 4 * sum(shape.numel() for shape in one.weights.shapes().values())
    give_back_cached()
    allocated, in_use = device_bytes()
    assert allocated >= kept
    one.memory.leave()
    left, still_in_use = device_bytes()
    assert left < 0.05 * kept
    assert in_use - still_in_use > 0.8 * kept
    one.memory.enter()
    assert device_bytes()[0] >= kept
