"""Muon beside singular value decompositions, a formula in float64 and torch's own Muon."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.training.optimizer import COEFFICIENTS, RMS, Muon, orthogonalised

LARGER = RMS / 0.2
"""Ratio of an update to torch's update at the same rate."""
SHAPES = [(64, 64), (48, 96), (96, 32), (7, 5), (1, 9)]


def gradient(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def muon(matrix: Tensor, *, weight_decay: float = 0.0, iterations: int = 5) -> Muon:
    return Muon([matrix], lr=0.02, momentum=0.9, weight_decay=weight_decay, iterations=iterations)


def by_hand(matrix: npt.NDArray[np.float64], iterations: int) -> npt.NDArray[np.float64]:
    """The quintic on the singular values themselves."""
    a, b, c = COEFFICIENTS
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(iterations):
        s = a * s + b * s**3 + c * s**5
    result: npt.NDArray[np.float64] = (u * s) @ v
    return result


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("iterations", [1, 3, 5])
def test_an_iteration_is_the_quintic_on_the_singular_values(
    shape: tuple[int, int], iterations: int
) -> None:
    matrix = gradient(shape, 1)
    expected = by_hand(matrix.double().numpy(), iterations)
    found = orthogonalised([matrix], iterations)[0]
    assert found.shape == matrix.shape
    assert np.abs(found.numpy() - expected).max() < 1e-4


@given(rows=st.integers(1, 40), columns=st.integers(1, 40), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_seven_iterations_bring_singular_values_of_any_size_near_one(
    rows: int, columns: int, seed: int
) -> None:
    matrix = gradient((rows, columns), seed)
    wanted = torch.linalg.svdvals(matrix.double())
    found = torch.linalg.svdvals(orthogonalised([matrix.double()], 7)[0])
    large = wanted > 0.01 * math.sqrt(float((wanted**2).sum()))
    assert float(found.max()) < 1.25
    assert float(found[large].min()) > 0.6


@pytest.mark.parametrize("shape", [(64, 64), (48, 96), (96, 32)])
def test_steps_are_those_of_torch_up_to_its_bfloat16(shape: tuple[int, int]) -> None:
    start = gradient(shape, 0)
    own, other = (torch.nn.Parameter(start.clone()) for _ in range(2))
    mine = muon(own, weight_decay=0.1)
    reference = torch.optim.Muon(
        [other],
        lr=0.02 * LARGER,
        momentum=0.9,
        weight_decay=0.1 / LARGER,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(1, 4):
        own.grad, other.grad = gradient(shape, step), gradient(shape, step)
        mine.step()
        reference.step()
    moved = float((other - start).detach().norm())
    difference = float((own - other).detach().norm())
    assert moved > 0.3
    assert difference < 0.02 * moved


def test_an_update_has_one_root_mean_square_however_small_the_gradient() -> None:
    matrix = torch.nn.Parameter(torch.zeros(128, 352))
    matrix.grad = gradient((128, 352), 3) * 1e-6
    muon(matrix).step()
    assert float(matrix.detach().square().mean().sqrt()) == pytest.approx(0.02 * RMS, rel=0.3)


def test_without_a_gradient_nothing_moves_and_a_zero_one_only_decays() -> None:
    matrix = torch.nn.Parameter(torch.ones(8, 4))
    optimizer = muon(matrix, weight_decay=0.5)
    optimizer.step()
    assert torch.equal(matrix, torch.ones(8, 4))
    matrix.grad = torch.zeros(8, 4)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((8, 4), 1 - 0.02 * 0.5))
