"""Updates of the bench of weights, beside torch's optimiser and its rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.weights.in_place import served_in_place, shape_of
from benchmarks.weights.updates import (
    BETA_1,
    BETA_2,
    DECAY,
    EPSILON,
    all_moved,
    late_step,
    moved,
    stepped,
)
from paceline.models.profiles import ROUNDED
from paceline.tensors import as_numpy


def test_a_late_step_is_that_of_torchs_adamw() -> None:
    rng = np.random.default_rng(0)
    weight, gradient, first = rng.standard_normal((3, 50, 40), dtype=np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(weight.copy()))
    parameter.grad = torch.from_numpy(gradient)
    optimizer = torch.optim.AdamW(
        [parameter], lr=0.1, betas=(BETA_1, BETA_2), eps=EPSILON, weight_decay=DECAY
    )
    optimizer.state[parameter] = {
        "step": torch.tensor(1e6),
        "exp_avg": torch.from_numpy(first.copy()),
        "exp_avg_sq": torch.ones(50, 40),
    }
    optimizer.step()
    late_step(weight, gradient, first, 0.1)
    assert np.allclose(weight, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_weights_are_rounded_as_torch_rounds_them_and_have_7b_shapes() -> None:
    old, new = stepped(20_000_000, 1e-6)
    assert [one.shape for one in old] == [(4096, 4096), (787, 4096)]
    rng = np.random.default_rng(0)
    weight = torch.from_numpy(rng.standard_normal((4096, 4096), dtype=np.float32)) * 0.02
    rounded = weight.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(as_numpy(old[0]), rounded)
    changed = np.mean(as_numpy(old[0]) != as_numpy(new[0]))
    assert 0.005 < changed < 0.02


def test_moved_weights_are_a_share_of_them_and_all_are_finite() -> None:
    (old,), _ = stepped(1_000_000, 0.0)
    assert np.mean(moved(old, 0.03) != as_numpy(old)) == pytest.approx(0.03, rel=0.05)
    assert np.all(all_moved(old) != as_numpy(old))
    assert np.all((all_moved(old) & 0x7F80) != 0x7F80)


@pytest.mark.parametrize(("millions", "near"), [(1, 0.8), (50, 50), (404, 405), (1000, 1012)])
def test_a_model_that_is_served_has_about_as_many_weights_as_it_is_called_by(
    millions: float, near: float
) -> None:
    shape = shape_of(millions)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    layer = 4 * hidden**2 + 3 * hidden * inner
    assert shape["num_hidden_layers"] * layer / 1e6 == pytest.approx(near, rel=0.02)


def test_every_profile_that_can_be_computed_is_served_in_fewer_bytes_than_bfloat16() -> None:
    plain, *rounded = served_in_place(1, 1)
    assert plain["profile"] == "bfloat16"
    assert {"fp8_channel", "fp8_tensor"} <= {row["profile"] for row in rounded} <= {*ROUNDED}
    layers = float(plain["MB"]) - 2 * 512 * 256 * 2 / 1e6  # but for embedding and head
    for row in rounded:
        saved = float(plain["MB"]) - float(row["MB"])
        assert saved == pytest.approx(layers / 2, rel=0.03)
