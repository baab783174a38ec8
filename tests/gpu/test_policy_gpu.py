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
from paceline.services.policy_trainer.learn.model import head_logprobs
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


@pytest.mark.parametrize("vocabulary", [512, 1000])
def test_cut_cross_entropy_scores_and_learns_as_whole_logits_do(vocabulary: int) -> None:
    pytest.importorskip("cut_cross_entropy", reason="the extra `cut`")
    source = torch.Generator().manual_seed(3)
    head = torch.nn.Linear(128, vocabulary, bias=False)
    drawn = torch.randn(head.weight.shape, generator=source)
    head.weight.data.copy_(drawn.mul_(0.3).bfloat16())
    rows = torch.randn(300, 128, generator=source).bfloat16()
    targets = torch.randint(0, vocabulary, (300,), generator=source)
    weights = torch.linspace(-1, 1, 300)

    wide = [one.double().requires_grad_() for one in (rows, head.weight.data)]
    wanted = (wide[0] @ wide[1].T).log_softmax(-1)[torch.arange(300), targets]
    (weights.double() * wanted).sum().backward()

    head, live = head.bfloat16().cuda(), rows.cuda().requires_grad_()
    found, entropy = head_logprobs(
        live, head, targets.cuda(), chunk_rows=64, kernel="cut_cross_entropy"
    )
    (weights.cuda() * found).sum().backward()
    assert torch.allclose(found.double().cpu(), wanted, atol=2e-2)
    assert torch.equal(entropy, -found)
    for ours, other in zip((live, head.weight), wide, strict=True):
        assert ours.grad is not None
        assert other.grad is not None
        off = (ours.grad.double().cpu() - other.grad).norm() / other.grad.norm()
        assert off < 2e-2  # of bfloat16


def test_a_step_with_cut_cross_entropy_is_one_with_logits(tmp_path: Path, mesh: DeviceMesh) -> None:
    pytest.importorskip("cut_cross_entropy", reason="the extra `cut`")
    save_random(tmp_path / "model", "llama", **SHAPE, **HEADS)
    one, other = (
        learner(tmp_path / "model", mesh, compute_dtype="bfloat16", head_kernel=kernel)
        for kernel in ("torch", "cut_cross_entropy")
    )
    batch = make_batch(trajectories(vocabulary=512), 4)
    expected, found = one.step(batch).figures, other.step(batch).figures
    for name in ("loss", "grad_norm", "behavior_gap"):
        assert found[name] == pytest.approx(expected[name], rel=5e-2, abs=1e-3), name
