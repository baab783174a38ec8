"""Seconds of a round: the table between its points, corrections that follow and do not jump at
outliers, lengths.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.rollout_gateway.bandits.base import CostSample
from paceline.services.rollout_gateway.bandits.cost_model.costs import CostTable
from paceline.services.rollout_gateway.bandits.cost_model.lengths import REMEMBERED, ResponseLengths
from paceline.services.rollout_gateway.bandits.cost_model.pace import BatchSlope
from paceline.services.rollout_gateway.bandits.primed_costs import CONTEXT_STEP

ARMS = ("off", "eagle:3_1_4")


def table(*samples: CostSample) -> CostTable:
    costs = CostTable(ARMS, (1, 5), 1000)
    costs.prime(samples)
    return costs


def seconds(
    costs: CostTable, batch: int, context: int = 0, arm: str = "off", group: int = 0
) -> float:
    return costs.seconds(group, batch, context)[ARMS.index(arm)]


def test_the_table_is_linear_between_batch_sizes_and_goes_on_beyond() -> None:
    costs = table(CostSample("off", 2, 10, 1.0), CostSample("off", 4, 10, 3.0))
    assert [seconds(costs, batch) for batch in (1, 2, 3, 4, 6)] == pytest.approx(
        [1.0, 1.0, 2.0, 3.0, 5.0]
    )


def test_the_table_is_linear_between_contexts() -> None:
    middle = (2 + 0.5) * CONTEXT_STEP
    costs = table(CostSample("off", 1, 0, 1.0), CostSample("off", 1, int(2 * middle), 3.0))
    assert seconds(costs, 1, int(middle)) == pytest.approx(2.0)


def test_of_several_samples_the_median_counts() -> None:
    costs = table(*(CostSample("off", 1, 0, one) for one in (1.0, 1.1, 50.0)))
    assert seconds(costs, 1) == pytest.approx(1.1)


def test_an_arm_never_seen_is_not_a_number_and_others_are_left_out() -> None:
    costs = table(CostSample("off", 1, 0, 1.0), CostSample("medusa:3_1_4", 1, 0, 1.0))
    assert math.isnan(seconds(costs, 1, arm="eagle:3_1_4"))


def test_one_outlier_moves_a_correction_by_a_share_of_the_clip() -> None:
    costs = table(CostSample("off", 1, 0, 1.0))
    for _ in range(40):
        costs.observe(0, "off", 1, 0, 1.0)
    costs.observe(0, "off", 1, 0, 10.0)
    assert 1.0 < seconds(costs, 1) < 1.02


def test_seconds_that_double_for_good_are_believed_after_three_rounds() -> None:
    costs = table(CostSample("off", 1, 0, 1.0))
    for _ in range(40):
        costs.observe(0, "off", 1, 0, 1.0)
    for _ in range(3):
        costs.observe(0, "off", 1, 0, 2.0)
    assert seconds(costs, 1) > 1.4
    for _ in range(10):
        costs.observe(0, "off", 1, 0, 2.0)
    assert seconds(costs, 1) == pytest.approx(2.0, rel=0.05)


def test_what_slows_an_arm_in_one_group_is_expected_in_another() -> None:
    costs = table(*(CostSample("off", size, 0, 1.0) for size in (1, 8)))
    for _ in range(40):
        costs.observe(0, "off", 1, 0, 1.5)
    assert seconds(costs, 8, group=1) > 1.25


# ---- what is the machine's and what is an arm's own


def both(costs: CostTable, off: float, eagle: float, *, rounds: int = 60, burst: int = 6) -> None:
    """Rounds of both arms in turns of `burst`, so long in seconds."""
    for number in range(rounds):
        arm, spent = (("off", off), ("eagle:3_1_4", eagle))[number // burst % 2]
        costs.observe(0, arm, 1, 0, spent)


def ratio(costs: CostTable) -> float:
    """Of the two arms' seconds."""
    off, eagle = costs.seconds(0, 1, 0)
    return eagle / off


@pytest.fixture
def measured() -> CostTable:
    """Both arms are known, one second and two, and off is in use."""
    costs = table(CostSample("off", 1, 0, 1.0), CostSample("eagle:3_1_4", 1, 0, 2.0))
    both(costs, 1.0, 2.0)
    for _ in range(100):
        costs.observe(0, "off", 1, 0, 1.0)
    return costs


@pytest.mark.parametrize("pace", [0.5, 0.8, 1.2, 1.5])
def test_a_machine_of_another_pace_moves_the_seconds_of_arms_that_rest(
    measured: CostTable, pace: float
) -> None:
    for _ in range(300):
        measured.observe(0, "off", 1, 0, pace)
    assert seconds(measured, 1) == pytest.approx(pace, rel=0.02)
    assert ratio(measured) == pytest.approx(2.0, rel=0.05)


def test_a_machine_slower_than_when_the_table_was_measured_favours_no_arm() -> None:
    costs = table(CostSample("off", 1, 0, 1.0), CostSample("eagle:3_1_4", 1, 0, 2.0))
    for _ in range(10):
        costs.observe(0, "off", 1, 0, 1.5)
    assert ratio(costs) == pytest.approx(2.0, rel=0.02)


def test_what_two_arms_contradict_each_other_in_is_their_own(measured: CostTable) -> None:
    both(measured, 1.0, 2.5, rounds=400)
    assert measured.seconds(0, 1, 0) == pytest.approx([1.0, 2.5], rel=0.05)


def test_one_round_of_an_arm_that_rested_says_little_of_the_others(measured: CostTable) -> None:
    for _ in range(300):
        measured.observe(0, "off", 1, 0, 1.0)
    measured.observe(0, "eagle:3_1_4", 1, 0, 1.6)
    assert seconds(measured, 1) == pytest.approx(1.0, rel=0.02)
    assert seconds(measured, 1, arm="eagle:3_1_4") < 1.9


def test_an_arm_that_rests_while_another_slows_may_be_as_fast_as_it_was(
    measured: CostTable,
) -> None:
    """Then a choice looks at it; a round as fast as it was shows whose the change is."""
    before = measured.doubts(0)[1]
    for _ in range(300):
        measured.observe(0, "off", 1, 0, 1.5)
    assert measured.doubts(0)[1] / before == pytest.approx(1.5, rel=0.1)
    for _ in range(5):
        measured.observe(0, "eagle:3_1_4", 1, 0, 2.0)
    assert ratio(measured) == pytest.approx(2.0 / 1.5, rel=0.1)


def test_an_arm_that_is_used_is_not_hoped_to_be_faster_whatever_the_pace(
    measured: CostTable,
) -> None:
    for _ in range(300):
        measured.observe(0, "off", 1, 0, 1.5)
    assert measured.doubts(0)[0] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("pace", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("primed", [True, False])
def test_an_engine_of_another_pace_does_not_shift_the_arms_against_each_other(
    pace: float, primed: bool
) -> None:
    """Of this one's arms only off is known by its own rounds; eagle is known by the other's."""
    samples = (CostSample("off", 1, 0, 1.0), CostSample("eagle:3_1_4", 1, 0, 2.0)) if primed else ()
    here, there = table(*samples), table(*samples)
    both(there, pace, 2.4 * pace)
    for _ in range(40):
        here.observe(0, "off", 1, 0, 1.0)
    here.merge(there.snapshot())
    assert here.seconds(0, 1, 0) == pytest.approx([1.0, 2.4], rel=0.08)


def test_what_was_told_first_holds_at_the_pace_of_the_rounds_that_follow() -> None:
    here, there = table(), table()
    both(there, 3.0, 7.2)
    here.merge(there.snapshot())
    for _ in range(20):
        here.observe(0, "off", 1, 0, 1.0)
    assert here.seconds(0, 1, 0) == pytest.approx([1.0, 2.4], rel=0.08)


def test_the_first_slow_rounds_of_an_arm_without_a_table_are_warm_ups() -> None:
    costs = table()
    for spent in (9.0, 1.0, 1.0):
        costs.observe(0, "off", 1, 0, spent)
    assert seconds(costs, 1) == pytest.approx(1.0, rel=0.05)


def test_a_round_that_took_no_time_teaches_nothing() -> None:
    costs = table()
    costs.observe(0, "off", 1, 0, 0.0)
    assert math.isnan(seconds(costs, 1))
    assert costs.snapshot() == ()


@pytest.mark.parametrize(("empty", "row"), [(12.0, 0.05), (1.8, 0.2), (1.0, 0.8)])
def test_without_a_table_the_growth_with_the_batch_is_learned(empty: float, row: float) -> None:
    costs, source = table(), np.random.default_rng(1)
    for _ in range(400):
        batch = int(source.integers(5, 65))
        costs.observe(
            1, "off", batch, 0, (empty + row * batch) * math.exp(0.05 * source.standard_normal())
        )
    for batch in (8, 32, 64):
        assert seconds(costs, batch, group=1) == pytest.approx(empty + row * batch, rel=0.08)


def test_rounds_of_one_batch_size_say_nothing_of_growth() -> None:
    shape = BatchSlope()
    before = shape.slope
    for _ in range(100):
        shape.learn(8, 3.0)
    assert shape.slope == before


@given(
    lengths=st.lists(st.integers(1, 400), max_size=60),
    generated=st.lists(st.integers(0, 399), min_size=1, max_size=5),
)
def test_the_expected_rest_is_the_mean_of_longer_responses_and_the_limit(
    lengths: list[int], generated: list[int]
) -> None:
    known, limit = ResponseLengths(), 400
    known.add(lengths)
    rest = known.remaining(np.array(generated, dtype=float), np.full(len(generated), float(limit)))
    for done, one in zip(generated, rest.tolist(), strict=True):
        longer = [length - done for length in [*lengths, limit] if length > done]
        assert one == pytest.approx(
            sum(longer) / len(longer) if lengths.count(limit) == 0 or longer else 1.0
        )


def test_only_the_last_responses_are_remembered() -> None:
    known = ResponseLengths()
    known.add([400] * 10)
    known.add([100] * REMEMBERED)
    assert known.remaining(np.array([0.0]), np.array([400.0]))[0] == pytest.approx(
        (100 * REMEMBERED + 400) / (REMEMBERED + 1)
    )
