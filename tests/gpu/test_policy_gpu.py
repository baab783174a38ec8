"""The policy's step on a GPU: what saves memory there steps as the CPU does, and gives it back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from random_models import save_random
from torch.distributed.device_mesh import DeviceMesh
from unit.policy_trainer.sharded_step import trajectories, whole

from paceline.services.policy_trainer.batches.batch import make_batch
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.services.policy_trainer.learn.build import build_learner
from paceline.services.policy_trainer.learn.learner import Learner
from paceline.services.policy_trainer.learn.parallel import form_mesh
from paceline.training import STORE_VARIABLE

pytestmark = pytest.mark.gpu
SHAPE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
WAYS = {
    "plain": {},
    "compiled head": {"head_compiled": True, "head_rows": 64},
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
            held = torch.cuda.memory_allocated()
            other.memory.leave()
            assert torch.cuda.memory_allocated() < held / 2
            other.memory.enter()
    wanted = whole(one.published())
    for name, weight in whole(other.published()).items():
        assert torch.allclose(weight, wanted[name], atol=4e-3), name  # of three steps of 1e-3
