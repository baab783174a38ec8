"""Acceptance length is what counting gives; noise is that of whole sequences; nothing is promoted inside it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from drafter_trainer.gate import Judgement, accepted_tokens, judge


def test_accepted_tokens_are_those_before_the_first_miss() -> None:
    matches = np.random.default_rng(0).random((300, 5)) < 0.6
    counted = []
    for row in matches:
        accepted = 0
        for match in row:
            if not match:
                break
            accepted += 1
        counted.append(accepted)
    assert accepted_tokens(matches).tolist() == counted


def test_length_counts_the_bonus_token_and_the_difference_is_paired() -> None:
    candidate, serving = np.array([2, 0, 1, 5]), np.array([1, 0, 1, 2])
    verdict = judge(candidate, serving, np.array([0, 0, 1, 1]), resamples=200)
    assert (verdict.candidate, verdict.serving, verdict.positions) == (3.0, 2.0, 4)


def test_noise_is_the_standard_error_of_independent_sequences() -> None:
    draw = np.random.default_rng(1)
    serving = draw.integers(0, 5, 400)
    candidate = serving + draw.integers(-1, 2, 400)
    verdict = judge(candidate, serving, np.arange(400), resamples=2_000)
    expected = 1.96 * (candidate - serving).std() / math.sqrt(400)
    assert verdict.noise == pytest.approx(expected, rel=0.1)
    repeated = judge(*(np.repeat(values, 10) for values in (candidate, serving, np.arange(400))), resamples=2_000)
    assert repeated.noise == pytest.approx(expected, rel=0.1), "positions of one sequence are no independent evidence"


def test_equal_drafters_are_hardly_ever_promoted_and_better_ones_are() -> None:
    promoted = {0.0: 0, 0.4: 0}
    for better in promoted:
        for seed in range(200):
            draw = np.random.default_rng(seed)
            serving = draw.integers(0, 5, 300)
            candidate = serving + draw.integers(-1, 2, 300) + (draw.random(300) < better)
            promoted[better] += judge(candidate, serving, np.arange(300) // 10, resamples=200).promoted
    assert promoted[0.0] <= 14  # 2.5 % on this side of the interval: 5 expected
    assert promoted[0.4] >= 190


def test_one_sequence_or_no_difference_promotes_nothing() -> None:
    many, one = np.arange(50) // 5, np.zeros(50, dtype=np.int64)
    high, low = np.full(50, 4), np.full(50, 1)
    assert judge(high, low, one, resamples=200).noise == math.inf
    assert not judge(high, low, one, resamples=200).promoted
    assert not judge(low, low, many, resamples=200).promoted
    assert judge(high, low, many, resamples=200).promoted
    assert not Judgement(candidate=2.1, serving=2.0, noise=0.1 + 1e-9, positions=9).promoted
