"""Acceptance length equals a direct count. Noise is measured over whole groups of siblings; a gain
within the noise promotes nothing.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from paceline.services.drafter_trainer.config import GateConfig
from paceline.services.drafter_trainer.gate.comparison import Chain, MeasuredCosts, SizeGroup, judge
from paceline.services.drafter_trainer.messages import RoundCosts
from paceline.speculators.shift import conditional

FREE = dict.fromkeys(range(1, 6), 1.0)


def chain(
    counts: npt.ArrayLike,
    kind: str = "eagle",
    costs: dict[int, float] | None = None,
    *rest: SizeGroup,
) -> Chain:
    """Accepted drafts [N] of at most 5 as their survivals."""
    accepted = (np.asarray(counts)[:, None] > np.arange(5)).astype(np.float64)
    return Chain(kind, accepted, rest or [SizeGroup(1.0, costs or FREE)])


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


def test_a_longer_chain_of_a_dearer_kind_loses_by_projected_speedup() -> None:
    groups = np.arange(50) // 5
    dear, cheap = {1: 1.5, 3: 2.5, 5: 3.5}, {1: 1.1, 3: 1.3}
    long, short = chain(np.full(50, 4), "eagle", dear), chain(np.full(50, 3), "lstm", cheap)
    verdict = judge(long, short, groups)
    assert (verdict.candidate, verdict.serving) == (5.0, 4.0)
    # 2 / 1.5, 4 / 2.5, 5 / 3.5 against 2 / 1.1, 4 / 1.3
    assert (verdict.candidate_speedup, verdict.serving_speedup) == pytest.approx((1.6, 4 / 1.3))
    assert not verdict.better
    assert judge(short, long, groups).better


def test_where_an_arm_that_is_not_trained_is_faster_a_longer_drafter_is_better_all_the_same() -> (
    None
):
    groups = np.arange(50) // 5
    costs = {1: 1.2, 3: 1.5}
    for rival in (1.0, 2.0, 2.7):
        long, short = (
            chain(np.full(50, count), "eagle", None, SizeGroup(1.0, costs, rival))
            for count in (3, 1)
        )
        verdict = judge(long, short, groups)
        assert verdict.better
        assert not judge(short, long, groups).better
        assert verdict.candidate_speedup == pytest.approx(max(4 / 1.5, rival))
        assert verdict.serving_speedup == pytest.approx(max(2 / 1.2, rival))
        assert verdict.gain == pytest.approx((4 / 1.5) / (2 / 1.2) - 1), "of the drafters alone"


def test_one_that_is_faster_by_itself_is_not_better_where_it_makes_the_engine_slower() -> None:
    """Alone it is faster on the mean of both batch sizes; at one size a rival arm serves instead."""
    groups = np.arange(50) // 5
    few, many = (
        [SizeGroup(0.5, one, 1.0), SizeGroup(0.5, two, 3.0)]
        for one, two in (({1: 1.1}, {1: 1.0}), ({1: 1.0}, {1: 2.0}))
    )
    longer, shorter = (chain(np.full(50, 1), "eagle", None, *sizes) for sizes in (few, many))
    verdict = judge(longer, shorter, groups)
    assert verdict.gain == pytest.approx((2 / 1.1 + 2) / (2 + 1) - 1)
    assert verdict.candidate_speedup < verdict.serving_speedup
    assert not verdict.better


def test_a_gain_within_its_noise_where_others_are_faster_is_none() -> None:
    draw, groups = np.random.default_rng(3), np.arange(60) // 6
    sizes = SizeGroup(1.0, {1: 1.1, 3: 1.4}, rival=9.0)
    counts = draw.integers(0, 3, 60)
    alike, ours = (
        chain(of, "eagle", None, sizes) for of in (counts + draw.integers(-1, 2, 60), counts)
    )
    verdict = judge(alike, ours, groups)
    assert verdict.candidate_speedup == verdict.serving_speedup == 9.0
    assert abs(verdict.gain) < verdict.gain_noise
    assert not verdict.better


def test_speeds_of_batch_sizes_count_by_the_seconds_spent_in_them() -> None:
    few = SizeGroup(0.25, {1: 1.0, 3: 1.5}, rival=1.1)
    many = SizeGroup(0.75, {1: 2.0, 3: 5.0}, rival=1.3)
    one = chain(np.full(50, 3), "eagle", None, few, many)
    verdict = judge(one, one, np.arange(50) // 5)
    assert verdict.candidate_speedup == pytest.approx(0.25 * 4 / 1.5 + 0.75 * 1.3)


def test_a_difference_far_beyond_the_noise_is_decided_before_the_rest_is_measured() -> None:
    draw, groups = np.random.default_rng(2), np.arange(60) // 6
    low = draw.integers(0, 3, 60)
    assert not judge(chain(low + 2), chain(low), 0 * groups).decided, "no noise is known"
    noisy = low + draw.integers(1, 4, 60)
    assert judge(chain(noisy), chain(low), groups).decided
    alike = low + draw.integers(-1, 2, 60)
    assert not judge(chain(alike), chain(low), groups).decided


def test_costs_are_measured_where_all_kinds_are_and_trees_are_no_chains() -> None:
    table = MeasuredCosts(GateConfig(draft_steps=4))
    configured = {n: pytest.approx(1 + 0.15 * n) for n in (1, 2, 3, 4)}
    assert table.size_groups(["lstm"]) == ({"lstm": [SizeGroup(1.0, configured)]}, False)
    costs = {"eagle:3_1_4": 1.5, "eagle:2_4_8": 9.0, "eagle:9_1_10": 2.0, "eagle:1_1_2": 0.0}
    table.update(
        [
            RoundCosts(1, 0.2, costs, 1.25),
            RoundCosts(5, 0.3, {"ngram:3_1_4": 1.1}, 1.1),
            RoundCosts(21, 0.2, {"eagle:4_1_5": 3.0, "lstm:2_1_3": 1.5}, 1.0),
        ]
    )
    eagle = [SizeGroup(0.5, {3: 1.5}, 1.25), SizeGroup(0.5, {4: 3.0}, 1.0)]
    assert table.size_groups(["eagle"]) == ({"eagle": eagle}, True), "shares of what is known"
    both, measured = table.size_groups(["eagle", "lstm"])
    assert measured
    assert both["lstm"] == [SizeGroup(1.0, {2: 1.5}, 1.0)], "where both are measured"
    table.update([])
    assert table.size_groups(["eagle"])[1], "nothing new leaves what is known"
    found, measured = table.size_groups(["eagle", "mlp"])
    assert (found["eagle"][0].costs[2], measured) == (pytest.approx(1.3), False), (
        "measured and configured costs do not compare"
    )
