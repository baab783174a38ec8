"""When training stops paying and when it pays again."""

from __future__ import annotations

import dataclasses
from itertools import count

import numpy as np
import pytest

from paceline.services.drafter_trainer.gate.comparison import Judgement
from paceline.services.drafter_trainer.gate.freeze import Freeze


def judgement(
    gain: float, *, serving: float = 3.0, noise: float = 0.2, gain_noise: float = 0.0
) -> Judgement:
    return Judgement(
        candidate=serving,
        serving=serving,
        noise=0.1,
        positions=100,
        candidate_speedup=2.0 * (1 + gain),
        serving_speedup=2.0,
        speedup_noise=0.1,
        serving_noise=noise,
        survival=(0.5,),
        serving_survival=(0.5,),
        gain=gain,
        gain_noise=gain_noise,
    )


def froze(freeze: Freeze, gains: list[float], gain_noise: float = 0.0) -> list[bool]:
    """Return for each judgement whether it froze the drafter."""
    return [
        freeze.judged(judgement(gain, gain_noise=gain_noise), 4, promoted=False) for gain in gains
    ]


def test_so_many_judgements_without_gain_freeze() -> None:
    freeze = Freeze(after=3, gain=0.01)
    assert froze(freeze, [-0.02, -0.03, -0.02]) == [False, False, True]
    assert freeze.frozen
    assert freeze.baseline is not None
    assert dataclasses.astuple(freeze.baseline) == (3.0, pytest.approx(0.2 / 3**0.5), 4)


def test_a_gain_among_them_leaves_it_open_until_the_mean_says_otherwise() -> None:
    freeze = Freeze(after=3, gain=0.01)
    gains = [0.0, 0.05, 0.0, -0.02, -0.02, -0.02, -0.02, -0.02]
    told = froze(freeze, gains)
    first = told.index(True)
    seen = np.array(gains[: first + 1])
    assert seen.mean() + 1.645 * seen.std(ddof=1) / len(seen) ** 0.5 <= 0.01
    assert seen[:-1].mean() + 1.645 * seen[:-1].std(ddof=1) / first**0.5 > 0.01


def test_gains_that_are_hardly_measured_freeze_nothing() -> None:
    assert not any(froze(Freeze(after=3, gain=0.01), [-0.02] * 5, gain_noise=0.2))
    # 1.645 / 1.96 * 0.2 / sqrt(n) <= 0.03 from 32 on, and no more than 20 are remembered
    assert not any(froze(Freeze(after=3, gain=0.01), [-0.02] * 40, gain_noise=0.2))
    assert froze(Freeze(after=3, gain=0.01), [-0.02] * 8, gain_noise=0.1).index(True) == 7


def test_a_promotion_begins_anew_and_zero_never_freezes() -> None:
    freeze = Freeze(after=2, gain=0.01)
    assert not freeze.judged(judgement(0.0), 1, promoted=False)
    assert not freeze.judged(judgement(0.3), 1, promoted=True)
    assert not freeze.judged(judgement(0.0), 1, promoted=False)
    assert freeze.judged(judgement(0.0), 1, promoted=False)
    never = Freeze(after=0, gain=0.01)
    assert not any(never.judged(judgement(0.0), 1, promoted=False) for _ in range(50))


def test_a_fall_beyond_the_noise_of_both_measurements_reopens() -> None:
    for length, noise, falls in ((2.55, 0.4, False), (3.6, 0.0, False), (2.45, 0.4, True)):
        freeze = Freeze(after=1, gain=0.01)
        assert not freeze.measured(1.0, 0.0), "nothing is frozen"
        freeze.judged(judgement(0.0, serving=3.0, noise=0.3), 1, promoted=False)
        assert freeze.measured(length, noise) == falls  # hypot(0.3, 0.4) = 0.5
        assert freeze.frozen == (not falls)


def test_it_is_tried_again_after_twice_as_many_looks_each_time_and_anew_after_a_promotion() -> None:
    freeze = Freeze(after=1, gain=0.01)

    def looks() -> int:
        freeze.judged(judgement(0.0), 1, promoted=False)
        assert freeze.frozen
        return next(number for number in count(1) if freeze.measured(3.0, 0.2))

    assert [looks() for _ in range(3)] == [2, 4, 8]
    freeze.judged(judgement(0.1), 1, promoted=True)
    assert looks() == 2


def test_after_looks_that_found_no_fall_half_the_judgements_decide_and_after_a_fall_all() -> None:
    freeze = Freeze(after=4, gain=0.01)
    assert froze(freeze, [0.0] * 4) == [False, False, False, True]
    assert [freeze.measured(3.0, 0.2) for _ in range(2)] == [False, True]
    assert froze(freeze, [0.0, 0.0]) == [False, True]
    assert freeze.measured(2.0, 0.2)
    assert froze(freeze, [0.0] * 4) == [False, False, False, True]
    for _ in range(8):
        freeze.measured(3.0, 0.2)
    assert froze(freeze, [0.09, 0.0, 0.0]) == [False] * 3, "a gain has it go on"


def test_a_freeze_outlives_its_process() -> None:
    freeze = Freeze(after=2, gain=0.01)
    freeze.judged(judgement(0.0), 1, promoted=False)
    half = Freeze(after=2, gain=0.01)
    half.load_state(freeze.state())
    assert half.judged(judgement(0.0), 1, promoted=False)
    whole = Freeze(after=2, gain=0.01)
    whole.load_state(half.state())
    assert whole.baseline == half.baseline is not None
