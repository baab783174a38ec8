"""Costs and lengths of measured rounds."""

from __future__ import annotations

import pytest

from paceline.speculators.costs import LEAST_ROUNDS, accept_lengths, round_costs
from paceline.v1.engine_pb2 import ArmStats
from paceline.v1.trajectory_pb2 import SpeculationStats


def arm(name: str, group: int, pulls: int, tokens_per_s: float, length: float) -> ArmStats:
    return ArmStats(
        arm=name,
        batch_group=group,
        pulls=pulls,
        mean_tokens_per_s=tokens_per_s,
        mean_accept_length=length,
    )


def test_rounds_cost_their_tokens_by_their_rate_relative_to_plain_decoding_in_each_group() -> None:
    arms = [
        arm("off", 1, 10, 100.0, 1.0),  # 10 rounds of 10 ms
        arm("eagle:3_1_4", 1, 30, 200.0, 3.0),  # 30 of 15 ms
        arm("ngram:4_1_5", 1, 5, 125.0, 1.5),  # 5 of 12 ms
        arm("off", 5, 10, 400.0, 1.0),  # of 5 rows: 10 of 12.5 ms
        arm("eagle:3_1_4", 5, 10, 500.0, 2.5),  # 10 of 25 ms
        arm("ngram:4_1_5", 5, 0, 0.0, 0.0),
    ]
    one, five = round_costs(arms)
    assert (one.batch_group, five.batch_group) == (1, 5)
    assert dict(one.costs) == pytest.approx({"eagle:3_1_4": 1.5, "ngram:4_1_5": 1.2})
    assert dict(five.costs) == pytest.approx({"eagle:3_1_4": 2.0})
    assert (one.rival, five.rival) == pytest.approx((1.25, 1.0)), "the best that is not trained"
    seconds = (0.1 + 0.45 + 0.06, 0.125 + 0.25)
    assert (one.share, five.share) == pytest.approx([part / sum(seconds) for part in seconds])
    assert round_costs([]) == round_costs(arms[1:2]) == []


def test_where_no_round_went_without_drafts_the_nearest_group_says_what_one_costs() -> None:
    arms = [
        arm("off", 1, 10, 100.0, 1.0),  # 10 ms
        arm("eagle:3_1_4", 1, 30, 200.0, 3.0),  # 15 ms
        arm("off", 5, 10, 400.0, 1.0),  # 12.5 ms
        arm("eagle:3_1_4", 5, 10, 500.0, 2.5),  # 25 ms: twice as long
        arm("eagle:3_1_4", 21, 10, 400.0, 2.5),
        arm("ngram:4_1_5", 21, 10, 800.0, 2.0),
        arm("eagle:5_1_6", 34, 10, 900.0, 3.0),  # absent from the other groups
    ]
    one, five, last = round_costs(arms)
    (*_, drafts_alone) = round_costs([*arms[:4], arms[4]])
    assert drafts_alone.rival == 1.0
    assert (one.batch_group, five.batch_group, last.batch_group) == (1, 5, 21)
    assert dict(last.costs) == pytest.approx({"eagle:3_1_4": 2.0, "ngram:4_1_5": 0.8})
    assert (one.rival, last.rival) == pytest.approx((1.0, 2.5)), "n-grams are told as a rival"


def test_lengths_by_arm_are_those_of_trained_drafters_that_many_rounds_say() -> None:
    rounds = {"eagle:5_1_6": LEAST_ROUNDS, "eagle:7_1_8": LEAST_ROUNDS - 1, "ngram:4_1_5": 500}
    tokens = {"eagle:5_1_6": 4 * LEAST_ROUNDS, "eagle:7_1_8": 300, "ngram:4_1_5": 900}
    stats = SpeculationStats(arm_drafted_rounds=rounds, arm_round_tokens=tokens)
    assert accept_lengths(stats) == {"eagle:5_1_6": 4.0}
    assert accept_lengths(SpeculationStats()) == {}
