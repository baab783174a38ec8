"""When training stops paying and when it pays again."""

from __future__ import annotations

import dataclasses

from paceline.services.drafter_trainer.gate.comparison import Judgement
from paceline.services.drafter_trainer.gate.freeze import Freeze


def judgement(gain: float, *, serving: float = 3.0, noise: float = 0.2) -> Judgement:
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
    )


def test_so_many_judgements_in_a_row_without_gain_freeze() -> None:
    freeze = Freeze(after=3, gain=0.01)
    told = [
        freeze.judged(judgement(gain), 4, promoted=False) for gain in (0.0, 0.05, 0.0, -0.1, 0.009)
    ]
    assert told == [False, False, False, False, True], (
        "the gain of 5 % has to leave the window first"
    )
    assert freeze.frozen
    assert freeze.baseline is not None
    assert dataclasses.astuple(freeze.baseline) == (3.0, 0.2, 4)


def test_a_promotion_begins_anew_and_zero_never_freezes() -> None:
    freeze = Freeze(after=2, gain=0.01)
    assert not freeze.judged(judgement(0.0), 1, promoted=False)
    assert not freeze.judged(judgement(0.3), 1, promoted=True)
    assert not freeze.judged(judgement(0.0), 1, promoted=False)
    assert freeze.judged(judgement(0.0), 1, promoted=False)
    never = Freeze(after=0, gain=0.01)
    assert not any(never.judged(judgement(0.0), 1, promoted=False) for _ in range(50))


def test_a_fall_beyond_the_noise_of_both_measurements_reopens() -> None:
    freeze = Freeze(after=1, gain=0.01)
    assert not freeze.measured(1.0, 0.0), "nothing is frozen"
    freeze.judged(judgement(0.0, serving=3.0, noise=0.3), 1, promoted=False)
    assert not freeze.measured(2.55, 0.4), "0.45 is within hypot(0.3, 0.4)"
    assert not freeze.measured(3.6, 0.0)
    assert freeze.measured(2.45, 0.4)
    assert not freeze.frozen


def test_a_freeze_outlives_its_process() -> None:
    freeze = Freeze(after=2, gain=0.01)
    freeze.judged(judgement(0.0), 1, promoted=False)
    half = Freeze(after=2, gain=0.01)
    half.load_state(freeze.state())
    assert half.judged(judgement(0.0), 1, promoted=False)
    whole = Freeze(after=2, gain=0.01)
    whole.load_state(half.state())
    assert whole.baseline == half.baseline is not None
