"""Acceptance length equals a direct count. Noise is measured over whole groups of siblings; a gain
within the noise promotes nothing.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from paceline.services.drafter_trainer.config import GateConfig
from paceline.services.drafter_trainer.gate.comparison import (
    Floats,
    Judgement,
    MeasuredCosts,
    SizeGroup,
)
from paceline.services.drafter_trainer.gate.comparison import judge as judged
from paceline.services.drafter_trainer.messages import RoundCosts
from paceline.speculators.shift import conditional

FREE = SizeGroup(1.0, dict.fromkeys(range(1, 6), 1.0))


def chain(counts: npt.ArrayLike) -> Floats:
    """Accepted drafts [N] of at most 5 as their survivals."""
    return (np.asarray(counts)[:, None] > np.arange(5)).astype(np.float64)


def judge(
    candidate: Floats,
    serving: Floats,
    groups: npt.NDArray[np.int64],
    *sizes: SizeGroup,
    resamples: int = 200,
) -> Judgement:
    """The comparison, by default with free drafts."""
    return judged(candidate, serving, groups, sizes or [FREE], resamples=resamples)


def test_length_counts_the_bonus_token_and_the_difference_is_paired() -> None:
    verdict = judge(chain([2, 0, 1, 5]), chain([1, 0, 1, 2]), np.array([0, 0, 1, 1]))
    assert (verdict.candidate, verdict.serving, verdict.positions) == (3.0, 2.0, 4)
    assert verdict.survival == (0.75, 0.5, 0.25, 0.25, 0.25)
    assert verdict.serving_survival == (0.75, 0.25, 0.0, 0.0, 0.0)
    assert conditional(verdict.survival) == pytest.approx((0.75, 2 / 3, 0.5, 1.0, 1.0))
    assert conditional(verdict.serving_survival) == pytest.approx((0.75, 1 / 3, 0.0, 0.0, 0.0))


def test_noise_is_the_standard_error_of_independent_groups() -> None:
    draw = np.random.default_rng(1)
    serving = draw.integers(1, 5, 400)
    candidate = serving + draw.integers(-1, 2, 400)
    verdict = judge(chain(candidate), chain(serving), np.arange(400), resamples=2_000)
    expected = 1.96 * (candidate - serving).std() / math.sqrt(400)
    assert verdict.noise == pytest.approx(expected, rel=0.1)
    assert verdict.serving_noise == pytest.approx(1.96 * serving.std() / math.sqrt(400), rel=0.1)
    tenfold = [np.repeat(values, 10) for values in (candidate, serving, np.arange(400))]
    repeated = judge(chain(tenfold[0]), chain(tenfold[1]), tenfold[2], resamples=2_000)
    assert repeated.noise == pytest.approx(expected, rel=0.1), (
        "positions of one group are no independent evidence"
    )


def test_the_noise_of_few_groups_is_that_of_their_unbiased_spread() -> None:
    differences = np.array([0, 1, 1, 2])
    verdict = judge(
        chain(1 + differences.repeat(10)),
        chain(np.ones(40)),
        np.arange(4).repeat(10),
        resamples=20_000,
    )
    expected = 1.96 * differences.std(ddof=1) / math.sqrt(4)
    assert verdict.noise == pytest.approx(expected, rel=0.03)


def test_equal_drafters_are_hardly_ever_promoted_and_better_ones_are() -> None:
    promoted = {0.0: 0, 0.4: 0}
    for better in promoted:
        for seed in range(200):
            draw = np.random.default_rng(seed)
            serving = draw.integers(1, 4, 300)
            candidate = serving + draw.integers(-1, 2, 300) + (draw.random(300) < better)
            verdict = judge(chain(candidate), chain(serving), np.arange(300) // 10)
            promoted[better] += verdict.better
    assert promoted[0.0] <= 20  # 5 %: 10 expected
    assert promoted[0.4] >= 190


def test_one_group_or_no_difference_promotes_nothing() -> None:
    many, one = np.arange(50) // 5, np.zeros(50, dtype=np.int64)
    high, low = chain(np.full(50, 4)), chain(np.full(50, 1))
    assert judge(high, low, one).noise == math.inf
    assert not judge(high, low, one).better
    assert not judge(low, low, many).better
    assert judge(high, low, many).better


def test_speed_is_the_best_length_for_its_cost() -> None:
    groups = np.arange(50) // 5
    dear = SizeGroup(1.0, {1: 1.5, 3: 2.5, 5: 3.5})
    long, short = chain(np.full(50, 4)), chain(np.full(50, 3))
    verdict = judge(long, short, groups, dear)
    assert (verdict.candidate, verdict.serving) == (5.0, 4.0)
    # 2 / 1.5, 4 / 2.5, 5 / 3.5 against 2 / 1.5, 4 / 2.5, 4 / 3.5
    assert (verdict.candidate_speedup, verdict.serving_speedup) == pytest.approx((1.6, 1.6))
    assert not verdict.better


def test_where_an_arm_that_is_not_trained_is_faster_a_longer_drafter_is_better_all_the_same() -> (
    None
):
    groups = np.arange(50) // 5
    costs = {1: 1.2, 3: 1.5}
    for rival in (1.0, 2.0, 2.7):
        long, short = (chain(np.full(50, count)) for count in (3, 1))
        sizes = SizeGroup(1.0, costs, rival)
        verdict = judge(long, short, groups, sizes)
        assert verdict.better
        assert not judge(short, long, groups, sizes).better
        assert verdict.candidate_speedup == pytest.approx(max(4 / 1.5, rival))
        assert verdict.serving_speedup == pytest.approx(max(2 / 1.2, rival))
        assert verdict.gain == pytest.approx((4 / 1.5) / (2 / 1.2) - 1), "of the drafters alone"


def test_one_that_is_faster_by_itself_is_not_better_where_it_makes_the_engine_slower() -> None:
    """Alone it is faster on the mean of both batch sizes; at one size a rival arm serves instead."""
    sizes = SizeGroup(0.5, {1: 1.0}, rival=1.0), SizeGroup(0.5, {5: 1.0}, rival=4.0)
    all_or_none, always_one = chain(np.tile([5, 0], 25)), chain(np.ones(50))
    verdict = judge(all_or_none, always_one, np.arange(50) // 10, *sizes)
    assert verdict.gain == pytest.approx((1.5 + 3.5) / (2 + 2) - 1)
    assert verdict.gain > verdict.gain_noise
    assert (verdict.candidate_speedup, verdict.serving_speedup) == pytest.approx((2.75, 3.0))
    assert not verdict.better


def test_a_gain_within_its_noise_where_others_are_faster_is_none() -> None:
    draw, groups = np.random.default_rng(3), np.arange(60) // 6
    sizes = SizeGroup(1.0, {1: 1.1, 3: 1.4}, rival=9.0)
    counts = draw.integers(0, 3, 60)
    alike, ours = (chain(of) for of in (counts + draw.integers(-1, 2, 60), counts))
    verdict = judge(alike, ours, groups, sizes)
    assert verdict.candidate_speedup == verdict.serving_speedup == 9.0
    assert abs(verdict.gain) < verdict.gain_noise
    assert not verdict.better


def test_speeds_of_batch_sizes_count_by_the_seconds_spent_in_them() -> None:
    few = SizeGroup(0.25, {1: 1.0, 3: 1.5}, rival=1.1)
    many = SizeGroup(0.75, {1: 2.0, 3: 5.0}, rival=1.3)
    one = chain(np.full(50, 3))
    verdict = judge(one, one, np.arange(50) // 5, few, many)
    assert verdict.candidate_speedup == pytest.approx(0.25 * 4 / 1.5 + 0.75 * 1.3)


def test_a_difference_far_beyond_the_noise_is_decided_before_the_rest_is_measured() -> None:
    draw, groups = np.random.default_rng(2), np.arange(60) // 6
    low = draw.integers(0, 3, 60)
    assert not judge(chain(low + 2), chain(low), 0 * groups).decided, "no noise is known"
    noisy = low + draw.integers(1, 4, 60)
    assert judge(chain(noisy), chain(low), groups).decided
    alike = low + draw.integers(-1, 2, 60)
    assert not judge(chain(alike), chain(low), groups).decided


def test_costs_are_those_of_the_kind_and_trees_are_no_chains() -> None:
    table = MeasuredCosts(GateConfig(draft_steps=4))
    configured = {n: pytest.approx(1 + 0.15 * n) for n in (1, 2, 3, 4)}
    assert table.size_groups("lstm") == ([SizeGroup(1.0, configured)], False)
    costs = {"eagle:3_1_4": 1.5, "eagle:2_4_8": 9.0, "eagle:9_1_10": 2.0, "eagle:1_1_2": 0.0}
    table.update(
        [
            RoundCosts(1, 0.2, costs, 1.25),
            RoundCosts(5, 0.3, {"ngram:3_1_4": 1.1}, 1.1),
            RoundCosts(21, 0.2, {"eagle:4_1_5": 3.0, "lstm:2_1_3": 1.5}, 1.0),
        ]
    )
    eagle = [SizeGroup(0.5, {3: 1.5}, 1.25), SizeGroup(0.5, {4: 3.0}, 1.0)]
    assert table.size_groups("eagle") == (eagle, True), "shares of what is known"
    assert table.size_groups("lstm") == ([SizeGroup(1.0, {2: 1.5}, 1.0)], True)
    table.update([])
    assert table.size_groups("eagle")[1], "nothing new leaves what is known"
    assert table.size_groups("dflash") == ([SizeGroup(1.0, configured)], False)
