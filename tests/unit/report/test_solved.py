"""Estimates from an evaluation's samples, against counting every choice of samples."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.report.solved import SPREAD, accuracy, pass_at, pass_figures
from paceline.v1.rollout_pb2 import SampleFinished
from paceline.v1.trajectory_pb2 import Reward


def sample(task: int, value: float | None) -> SampleFinished:
    reward = None if value is None else Reward(value=value)
    return SampleFinished(group_id=f"accuracy-1-2.t{task}", reward=reward)


def test_a_sample_solves_its_task_with_a_reward_above_the_threshold() -> None:
    samples = [sample(0, 1.0), sample(0, None), sample(1, 0.5), sample(1, 0.6)]
    assert accuracy(samples, 0.5) == 0.5
    assert accuracy(samples, 0.4) == 0.75
    assert accuracy(samples, -1.0) == 0.75, "one without a reward solves nothing"
    assert accuracy([], 0.5) == 0.0


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_a_solution(
    counts: tuple[int, int], data: st.DataObject
) -> None:
    samples, solved = counts
    size = data.draw(st.integers(1, samples))
    outcomes = [True] * solved + [False] * (samples - solved)
    choices = list(combinations(outcomes, size))
    share = sum(any(one) for one in choices) / len(choices)
    assert pass_at(size, samples, solved) == pytest.approx(share)


def test_several_samples_give_pass_at_powers_of_two_and_at_all_of_them() -> None:
    rewards = [[1, 1, 0, 0, 0, 0], [0] * 6, [1] * 6]
    samples = [sample(task, value) for task, row in enumerate(rewards) for value in row]
    figures = pass_figures(samples, 6, 0.5)
    assert list(figures) == ["pass@2", "pass@4", "pass@6", SPREAD]
    assert figures["pass@2"] == pytest.approx((1 - 6 / 15 + 0 + 1) / 3)
    assert figures["pass@4"] == pytest.approx((1 - 1 / 15 + 0 + 1) / 3)
    assert figures["pass@6"] == pytest.approx(2 / 3)
    mean = (1 / 3 + 0 + 1) / 3
    squares = (1 / 3 - mean) ** 2 + mean**2 + (1 - mean) ** 2
    assert figures[SPREAD] == pytest.approx(math.sqrt(squares / 2 / 3))


def test_a_sample_that_never_came_back_solves_nothing() -> None:
    assert pass_figures([sample(0, 1.0)], 2, 0.5) == {"pass@2": 1.0}
    assert pass_figures([sample(0, 1.0), sample(1, 0.0)], 4, 0.5)["pass@2"] == pytest.approx(0.25)


def test_one_sample_a_task_tells_no_more_than_the_accuracy() -> None:
    assert pass_figures([sample(0, 1.0)], 1, 0.5) == {}
    assert pass_figures([], 4, 0.5) == {}
