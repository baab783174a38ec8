"""Losses, divergences, corrections and aggregations against plain floats, each where its bounds
bite; gradients against finite differences.
"""

from __future__ import annotations

import math
from typing import Literal

import policy_by_hand as by_hand
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.services.policy_trainer.algorithm_settings import CorrectionConfig
from paceline.services.policy_trainer.algorithms.losses import (
    bounded_ratio,
    clipped_surrogate,
    clipped_value_loss,
    correction_weights,
    divergence,
    token_weights,
)

LOGPROBS = st.floats(-4, -0.01)


def in_float64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss", "clipped"),
    [
        (1.0, 2.0, 0.0, -2.0, False),
        (1.5, 2.0, 0.0, -2.6, True),  # clipped at 1.3
        (0.5, 2.0, 0.0, -1.0, False),  # the minimum keeps the unclipped side
        (0.5, -2.0, 0.0, 1.6, True),  # clipped at 0.8
        (1.5, -2.0, 0.0, 3.0, False),
        (9.0, -2.0, 3.0, 6.0, True),  # bounded by the dual clip
        (2.5, -2.0, 3.0, 5.0, False),
        (9.0, 2.0, 3.0, -2.6, True),  # the dual clip leaves positive advantages alone
    ],
)
def test_the_surrogate_is_clipped_on_the_side_that_gains(
    ratio: float, advantage: float, dual: float, loss: float, clipped: bool
) -> None:
    losses, marks = clipped_surrogate(
        in_float64([ratio]), in_float64([advantage]), clip_low=0.2, clip_high=0.3, dual_clip=dual
    )
    assert losses.item() == pytest.approx(loss, rel=1e-12)
    assert marks.item() is clipped
    assert by_hand.surrogate(ratio, advantage, 0.2, 0.3, dual) == (
        pytest.approx(loss, rel=1e-12),
        clipped,
    )


@settings(max_examples=200)
@given(st.floats(0.01, 9), st.floats(-3, 3), st.sampled_from([0.0, 1.5, 3.0]))
def test_the_surrogate_is_the_one_by_hand(ratio: float, advantage: float, dual: float) -> None:
    losses, marks = clipped_surrogate(
        in_float64([ratio]), in_float64([advantage]), clip_low=0.2, clip_high=0.28, dual_clip=dual
    )
    loss, clipped = by_hand.surrogate(ratio, advantage, 0.2, 0.28, dual)
    assert losses.item() == pytest.approx(loss, rel=1e-12, abs=1e-15)
    assert marks.item() is clipped


def test_a_clipped_token_has_no_gradient_and_a_fresh_one_has_minus_its_advantage() -> None:
    policy = torch.tensor([-1.0, -1.0], requires_grad=True)
    ratio = bounded_ratio(policy - torch.tensor([-2.0, -1.0]))
    losses, _ = clipped_surrogate(ratio, torch.tensor([1.0, 3.0]), clip_low=0.2, clip_high=0.2)
    losses.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == [0.0, -3.0]


def test_a_ratio_beyond_every_measure_is_a_number() -> None:
    ratio = bounded_ratio(torch.tensor([-1e4, 0.0, 1e4]))
    assert ratio.isfinite().all()
    assert ratio[1] == 1.0


@settings(max_examples=100)
@given(LOGPROBS, LOGPROBS, st.sampled_from(["k1", "k2", "k3"]))
def test_divergences_are_the_formulas_and_their_gradients_the_finite_differences(
    policy: float, reference: float, estimator: Literal["k1", "k2", "k3"]
) -> None:
    at, other = in_float64([policy]).requires_grad_(), in_float64([reference])
    found = divergence(at, other, estimator)
    expected = by_hand.divergence(policy, reference, estimator)
    assert found.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert torch.autograd.gradcheck(lambda x: divergence(x, other, estimator), (at,))


@settings(max_examples=100)
@given(*[st.floats(-2, 2)] * 3, st.sampled_from([0.0, 0.2]))
def test_the_value_loss_is_the_larger_of_both(
    value: float, old: float, wanted: float, clip: float
) -> None:
    found = clipped_value_loss(
        in_float64([value]), in_float64([old]), in_float64([wanted]), value_clip=clip
    )
    expected = by_hand.value_loss(value, old, wanted, clip)
    assert found.item() == pytest.approx(expected, rel=1e-12, abs=1e-15)


PROXIMAL = [-1.0, -1.0, -0.5, -2.0, -3.0, -0.1]
BEHAVIOR = [-1.5, -4.0, -0.505, -2.01, -0.2, -9.9]
SEQUENCES = [0, 0, 1, 1, 2, 2]
GAPS = [p - b for p, b in zip(PROXIMAL, BEHAVIOR, strict=True)]
WHOLE = by_hand.by_sequence(GAPS, SEQUENCES)


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({}, [1.0] * 6),
        ({"weight": "token"}, [min(math.exp(g), 2.0) for g in GAPS]),
        ({"weight": "token", "cap": 1.01}, [min(math.exp(g), 1.01) for g in GAPS]),
        ({"weight": "sequence"}, [min(math.exp(sum(own)), 5.0) for own in WHOLE]),
        ({"keep": "band"}, [float(0.5 <= math.exp(g) <= 5) for g in GAPS]),
        (
            {"keep": "geometric"},
            [float(0.99 <= math.exp(sum(own) / len(own)) <= 1.01) for own in WHOLE],
        ),
        (
            {"keep": "band", "keep_low": 0.05, "keep_high": 1.9, "weight": "token"},
            [math.exp(g) if 0.05 <= math.exp(g) <= 1.9 else 0.0 for g in GAPS],
        ),
        ({"veto": 0.1}, [float(min(math.exp(g) for g in own) >= 0.1) for own in WHOLE]),
    ],
)
def test_corrections_are_the_formulas(given_: dict[str, object], expected: list[float]) -> None:
    proximal = in_float64(PROXIMAL).requires_grad_()
    weights, kept = correction_weights(
        CorrectionConfig.model_validate(given_),
        proximal,
        in_float64(BEHAVIOR),
        torch.tensor(SEQUENCES),
    )
    assert weights.tolist() == pytest.approx(expected, rel=1e-12)
    assert kept.tolist() == [one > 0 for one in expected]
    assert not weights.requires_grad
    assert len({round(one, 9) for one in expected}) > (1 if given_ else 0), "nothing bites"


SESSIONS = [0, 0, 0, 0, 2, 2, 3]  # number 1 has no trained token


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", [1 / 7] * 7),
        ("sequence_mean_token_sum", [1 / 4] * 7),
        ("sequence_mean_token_mean", [1 / 16] * 4 + [1 / 8] * 2 + [1 / 4]),
        ("constant", [1 / 40] * 7),
    ],
)
def test_the_weights_of_tokens_are_those_of_the_aggregation(
    kind: Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant"],
    expected: list[float],
) -> None:
    weights = token_weights(kind, torch.tensor(SESSIONS), 4, 10)
    assert weights.tolist() == pytest.approx(expected, rel=1e-6)
