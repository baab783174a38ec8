"""One step on one rank, and on two that reshard and recompute, is the same step."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from unit.policy_trainer import sharded_step
from unit.policy_trainer.sharded_step import trajectories

FEW = ("grpo", "ppo")
"""Modes of which one has a reference, the other a critic."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    directory = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def step(model: Path, out: Path, world_size: int, broken: int = -1) -> dict[str, torch.Tensor]:
    """Runs the step in `world_size` real gloo processes; see sharded_step.py for `broken`."""
    run_ranks(sharded_step.main, world_size, out.parent, model, out, broken)
    return load_file(out)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b| in the 2-norm."""
    return float((a - b).double().norm() / b.double().norm())


def reference(model: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the same batch by plain transformers: one sequence per forward,
    float64, no packing.
    """
    lm = LlamaForCausalLM.from_pretrained(model, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    trained = 0
    for trajectory in trajectories():
        ids = torch.tensor([trajectory.token_ids])
        logprobs = (lm(ids).logits[0] / trajectory.temperature).log_softmax(-1)
        for t in range(1, ids.shape[1]):
            if trajectory.loss_mask[t]:
                policy = logprobs[t - 1, ids[0, t]]
                total = total - trajectory.reward * (policy - policy.detach()).exp()
                trained += 1
    (total / trained).backward()
    return float(total.detach()) / trained, {
        f"grad.lm.{n}": p.grad for n, p in lm.named_parameters()
    }


def test_two_ranks_have_the_loss_and_the_gradients_of_plain_torch(
    model_dir: Path, tmp_path: Path
) -> None:
    two = step(model_dir, tmp_path / "two.safetensors", 2)
    loss, gradients = reference(model_dir)
    assert abs(float(two["figures"][0]) - loss) < 1e-6
    for name, gradient in gradients.items():
        assert relative(two[name].double(), gradient) < 1e-5, name


@pytest.mark.slow
def test_loss_gradients_and_weights_are_equal_on_one_and_two_ranks(
    model_dir: Path, tmp_path: Path
) -> None:
    one = step(model_dir, tmp_path / "one.safetensors", 1)
    two = step(model_dir, tmp_path / "two.safetensors", 2)
    assert one["figures"][4] > 1
    assert relative(two["figures"][:4], one["figures"][:4]) < 1e-6
    assert set(one) == set(two)
    for name in set(one) - {"figures"}:
        assert relative(two[name], one[name]) < 1e-5, name


def test_one_nan_on_one_rank_moves_no_weight_of_any(model_dir: Path, tmp_path: Path) -> None:
    start = LlamaForCausalLM.from_pretrained(model_dir).state_dict()
    stepped = step(model_dir, tmp_path / "broken.safetensors", 2, broken=5)
    assert stepped["figures"][3].isnan()
    gradients = [name for name in stepped if name.startswith("grad.")]
    assert all(stepped[name].isnan().any() for name in gradients), "the test needs a NaN everywhere"
    for name, weight in start.items():
        assert torch.equal(stepped[f"lm.{name}"], weight), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "modes"), [(0, tuple(sharded_step.MODES)), (3, FEW)], ids=["weights", "adapters"]
)
def test_five_steps_are_the_same_on_one_two_and_three_ranks(
    model_dir: Path, tmp_path: Path, rank: int, modes: tuple[str, ...]
) -> None:
    """All weights are compared in every mode."""
    made = []
    steps = partial(sharded_step.five_steps, rank=rank, modes=modes)
    for size in (1, 2, 3):
        out = tmp_path / f"{size}.safetensors"
        run_ranks(steps, size, tmp_path, model_dir, out)
        made.append(load_file(out))
    start = LlamaForCausalLM.from_pretrained(model_dir).state_dict()
    one, *others = made
    for key, value in one.items():
        for other in others:
            assert relative(other[key], value) < 1e-5, key
        if not key.endswith(".losses"):
            moves = not rank or "_proj" in key
            assert torch.equal(value, start[key.partition(".")[2]]) != moves, key


@pytest.mark.slow
def test_five_steps_in_bfloat16_go_where_those_in_float32_do(
    model_dir: Path, tmp_path: Path
) -> None:
    """Updates, which are small beside the rounding of weights, survive: the masters are fp32. Adam
    makes whole steps of gradients that are but rounding, so that the two are alike and not equal.
    """
    found = {}
    for name, saving in (("fp32", False), ("bf16", True)):
        out = tmp_path / f"{name}.safetensors"
        steps = partial(sharded_step.five_steps, saving=saving, modes=FEW)
        run_ranks(steps, 2, tmp_path, model_dir, out)
        found[name] = load_file(out)
    start = LlamaForCausalLM.from_pretrained(model_dir).state_dict()
    for mode in FEW:
        exact, rounded = (
            torch.cat([(one[f"{mode}.{k}"] - v).flatten() for k, v in start.items()])
            for one in (found["fp32"], found["bf16"])
        )
        likeness = torch.cosine_similarity(exact.double(), rounded.double(), dim=0)
        assert float(likeness) > 0.7, mode
        weights = [one for key, one in found["bf16"].items() if key.startswith(f"{mode}.model")]
        assert all(one.dtype == torch.float32 for one in weights)
        assert any(not torch.equal(one, one.bfloat16().float()) for one in weights)


def test_a_rank_holds_its_shards_and_one_unit_while_it_loads(
    model_dir: Path, tmp_path: Path
) -> None:
    run_ranks(sharded_step.loading, 2, tmp_path, model_dir, tmp_path / "loaded.safetensors")
    loaded = load_file(tmp_path / "loaded.safetensors")
    start = LlamaForCausalLM.from_pretrained(model_dir).state_dict()
    most, shards = loaded.pop("held").tolist()
    assert set(loaded) == set(start)
    assert all(torch.equal(loaded[name], start[name]) for name in start)
    layer = sum(one.numel() for name, one in start.items() if ".layers.0." in name)
    rest = sum(one.numel() for name, one in start.items() if ".layers." not in name)
    assert most <= shards + max(layer, rest)
    assert most < sum(one.numel() for one in start.values())
