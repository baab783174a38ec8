"""AdamW with moments of eight bits, against the same written by hand in plain numbers."""

from __future__ import annotations

import bisect
import math

import pytest
import torch
from torch import Tensor

from paceline.config import OptimizerConfig
from paceline.errors import ConfigError
from paceline.training.optimizer import MOMENTS, NamedOptimizer

BLOCK = 256
CONFIG = OptimizerConfig(lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, clip_norm=1e9)


def levels(signed: bool) -> list[float]:
    """The dynamic data type of Dettmers et al. 2021, section 3: an exponent of tens, a fraction of
    equal parts; and the lowest signed level at -1.
    """
    found = [0.0, 1.0]
    for exponent in range(7):
        parts = 2**exponent if signed else 2 ** (exponent + 1)
        width = 0.9 / parts
        for i in range(parts):
            level = 10 ** (exponent - 6) * (0.1 + (i + 0.5) * width)
            found += [level, -level] if signed else [level]
    found.sort()
    if signed:
        found[0] = -1.0
    return found


def nearest(value: float, among: list[float]) -> float:
    at = bisect.bisect_left(among, value)
    return min(among[max(0, at - 1) : at + 1], key=lambda level: abs(level - value))


def quantised(values: list[float], *, signed: bool) -> list[float]:
    among, found = levels(signed), []
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        scale = max(max(map(abs, block)), 1e-12)
        found += [nearest(value / scale, among) * scale for value in block]
    return found


def gradients(step: int, like: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(like.shape, generator=draw) * torch.logspace(-3, 0, like.numel()).view_as(
        like
    )


def steps_by_hand(weights: list[float], like: Tensor, steps: int) -> list[float]:
    first, second = [0.0] * len(weights), [0.0] * len(weights)
    (beta1, beta2), lr, decay = CONFIG.betas, CONFIG.lr, CONFIG.weight_decay
    for t in range(1, steps + 1):
        for i, gradient in enumerate(gradients(t, like).flatten().tolist()):
            first[i] = beta1 * first[i] + (1 - beta1) * gradient
            second[i] = beta2 * second[i] + (1 - beta2) * gradient**2
            mean, square = first[i] / (1 - beta1**t), second[i] / (1 - beta2**t)
            weights[i] -= lr * decay * weights[i] + lr * mean / (math.sqrt(square) + 1e-8)
        first, second = quantised(first, signed=True), quantised(second, signed=False)
    return weights


def trained(weights: Tensor, optimizer: NamedOptimizer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        weights.grad = gradients(step, weights)
        optimizer.step(step)


def test_steps_are_those_of_moments_rounded_to_the_dynamic_data_type() -> None:
    start = torch.randn(16, 256, generator=torch.Generator().manual_seed(7))
    weights = torch.nn.Parameter(start.clone())
    optimizer = NamedOptimizer({"w": weights}, CONFIG, moments="int8")
    trained(weights, optimizer, 1, 4)
    wanted = torch.tensor(steps_by_hand(start.flatten().tolist(), start, 4)).view_as(start)
    exact = torch.nn.Parameter(start.clone())
    trained(exact, NamedOptimizer({"w": exact}, CONFIG), 1, 4)
    # A number in the middle between two levels may be rounded to either.
    close = (weights.detach() - wanted).abs() < 1e-6
    assert close.float().mean() > 0.999
    assert ((exact.detach() - wanted).abs() < 1e-6).float().mean() < 0.5, "rounding must be seen"


def test_moments_take_a_quarter_and_go_on_bit_for_bit_from_their_state_in_float32() -> None:
    start = torch.randn(64, 256, generator=torch.Generator().manual_seed(7))
    whole, before = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    one = NamedOptimizer({"w": whole}, CONFIG, moments="int8")
    trained(whole, one, 1, 6)
    stopped = NamedOptimizer({"w": before}, CONFIG, moments="int8")
    trained(before, stopped, 1, 3)
    state = stopped.state(None)
    assert {tuple(state[f"optimizer/w/{name}"].shape) for name in MOMENTS} == {(64, 256)}
    assert state["optimizer/w/exp_avg"].dtype == torch.float32
    assert stopped.moments("w")["exp_avg"].codes.nbytes == start.nbytes / 4

    after = torch.nn.Parameter(torch.zeros_like(start))
    resumed = NamedOptimizer({"w": after}, CONFIG, moments="int8")
    resumed.load_state(state)
    again = resumed.state(None)
    assert all(
        torch.equal(again[f"optimizer/w/{name}"], state[f"optimizer/w/{name}"]) for name in MOMENTS
    )
    trained(after, resumed, 4, 6)
    assert torch.equal(after, whole)


def test_a_state_of_float32_moments_is_taken_up_in_eight_bits() -> None:
    start = torch.randn(32, 256, generator=torch.Generator().manual_seed(7))
    before = torch.nn.Parameter(start.clone())
    plain = NamedOptimizer({"w": before}, CONFIG)
    trained(before, plain, 1, 3)
    after = torch.nn.Parameter(torch.zeros_like(start))
    resumed = NamedOptimizer({"w": after}, CONFIG, moments="int8")
    resumed.load_state(plain.state(None))
    assert torch.equal(after, before)
    wanted, found = plain.moments("w")["exp_avg"], resumed.moments("w")["exp_avg"].dequantize()
    error = (wanted - found).abs().view(-1, BLOCK).amax(-1) / wanted.abs().view(-1, BLOCK).amax(-1)
    assert float(error.max()) < 0.01


def test_small_tensors_keep_float32_moments() -> None:
    small = torch.nn.Parameter(torch.ones(61))
    exact = torch.nn.Parameter(torch.ones(61))
    one, other = (
        NamedOptimizer({"w": small}, CONFIG, moments="int8"),
        NamedOptimizer({"w": exact}, CONFIG),
    )
    trained(small, one, 1, 3)
    trained(exact, other, 1, 3)
    assert type(one.moments("w")["exp_avg"]) is Tensor
    assert torch.allclose(small, exact, atol=1e-6, rtol=0)


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.training.optimizer.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"paceline\[int8\]"):
        NamedOptimizer({"w": torch.nn.Parameter(torch.ones(3))}, CONFIG, moments="int8")
