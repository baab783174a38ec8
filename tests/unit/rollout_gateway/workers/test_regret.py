"""The regret estimate against calculations by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.rollout_gateway.workers.metrics import regret
from paceline.v1 import engine_pb2 as pb


def report(arm: str, group: int, pulls: int, rate: float) -> pb.ArmStats:
    return pb.ArmStats(arm=arm, batch_group=group, pulls=pulls, mean_tokens_per_s=rate)


def test_regret_is_the_share_lost_against_each_groups_best_arm() -> None:
    arms = [
        report("off", 1, 10, 50.0),  # loses half of 10 rounds
        report("eagle:5_1_6", 1, 30, 100.0),
        report("off", 5, 40, 400.0),
        report("eagle:5_1_6", 5, 20, 300.0),  # loses a quarter of 20 rounds
    ]
    assert regret(arms) == pytest.approx((5 + 5) / 100)
    assert regret(
        pb.ArmStats(
            arm=one.arm,
            batch_group=one.batch_group,
            pulls=one.pulls,
            mean_tokens_per_s=one.mean_tokens_per_s,
        )
        for one in arms
    ) == pytest.approx(0.1)


def test_an_arm_of_unknown_speed_and_one_never_pulled_do_not_count() -> None:
    known = [report("off", 1, 10, 50.0), report("ngram:4_1_5", 1, 10, 100.0)]
    assert (
        regret([*known, report("eagle:5_1_6", 1, 99, 0.0), report("eagle:3_1_4", 1, 0, 900.0)])
        == 0.25
    )


def test_nothing_is_regretted_without_a_choice() -> None:
    assert regret([]) == 0.0
    assert regret([report("off", 1, 10, 5.0), report("eagle:5_1_6", 5, 10, 50.0)]) == 0.0


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 5]), st.integers(0, 10**6), st.floats(0, 1e6)), max_size=12
    )
)
def test_regret_is_a_share(rows: list[tuple[int, int, float]]) -> None:
    assert 0.0 <= regret(report(str(i), *row) for i, row in enumerate(rows)) < 1.0 + 1e-9
