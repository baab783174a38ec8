"""The closed groups that the learner may take, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.services.coordinator.machine.schedule import bits, next_batch
from paceline.services.coordinator.machine.settings import RunSettings, Schedule
from paceline.services.coordinator.machine.state import (
    DrawnStep,
    LearnerTrack,
    Phase,
    Portion,
    RolloutTrack,
    State,
)

ASYNC = RunSettings(
    schedule=Schedule.FULLY_ASYNC, max_policy_lag=1, groups_per_step=2, total_steps=9
)
BOTH, FIRST, SECOND, NONE = 0b11, 0b01, 0b10, 0b00


def state(version: int, *draws: DrawnStep) -> State:
    rollouts = RolloutTrack(phase=Phase.ROLLOUT, step=len(draws), draws=draws)
    return State(
        settings=ASYNC, phase=Phase.RUNNING, rollouts=rollouts, learner=LearnerTrack(step=version)
    )


@pytest.mark.parametrize(
    ("version", "draws", "batch"),
    [
        # Drawn at 0, so trained at 1 at the latest: late groups may wait for the next batch, ...
        (
            0,
            [DrawnStep(0, 0, closed=FIRST), DrawnStep(1, 0, closed=FIRST)],
            [(0, FIRST), (1, FIRST)],
        ),
        # ... and not for the one after it.
        (
            1,
            [DrawnStep(0, 0, closed=FIRST, taken=FIRST), DrawnStep(1, 0, closed=BOTH, taken=FIRST)],
            [],
        ),
        (
            1,
            [DrawnStep(0, 0, closed=BOTH, taken=FIRST), DrawnStep(1, 0, closed=BOTH, taken=FIRST)],
            [(0, SECOND), (1, SECOND)],
        ),
        # Both groups of step 1 have closed. The groups of step 0 and one group of step 2 would then
        # not fit into the batch at version 2.
        (
            1,
            [
                DrawnStep(0, 0, closed=BOTH, taken=BOTH),
                DrawnStep(1, 0, closed=FIRST),
                DrawnStep(2, 1, closed=BOTH),
            ],
            [],
        ),
        # Groups of step 1 drawn at version 1 may be late while the batch takes groups of step 2.
        (1, [DrawnStep(1, 1, closed=NONE), DrawnStep(2, 1, closed=BOTH)], [(2, BOTH)]),
    ],
)
def test_a_batch_leaves_nothing_that_could_not_be_trained_in_time(
    version: int, draws: list[DrawnStep], batch: list[tuple[int, int]]
) -> None:
    found = next_batch(state(version, *draws))
    assert found == tuple(Portion(step, groups) for step, groups in batch)


def test_a_batch_waits_for_nothing_that_may_be_late_for_ever() -> None:
    draws = (DrawnStep(0, 0, closed=FIRST), DrawnStep(1, 0, closed=FIRST))
    patient = replace(state(1, *draws), settings=replace(ASYNC, max_policy_lag=9))
    assert next_batch(patient) == (Portion(0, FIRST), Portion(1, FIRST))
    assert next_batch(state(1, *draws)) == ()


def test_a_batch_is_the_lowest_groups_whatever_their_number() -> None:
    generator = np.random.default_rng(20)
    for groups in (*range(1, 9), 64, 1000):
        for share in (0.3, 0.6, 0.9):
            first, second = (generator.random(groups) < share for _ in range(2))
            closed = [
                sum(1 << int(place) for place in np.flatnonzero(one)) for one in (first, second)
            ]
            draws = tuple(DrawnStep(step, 0, closed=one) for step, one in enumerate(closed))
            settings = replace(ASYNC, groups_per_step=groups, max_policy_lag=9)
            expected = [(step, place) for step in (0, 1) for place in bits(closed[step])][:groups]
            batch = next_batch(replace(state(0, *draws), settings=settings))
            taken = [(one.step, place) for one in batch for place in bits(one.groups or 0)]
            assert taken == (expected if len(expected) == groups else [])


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 1.0])
def test_the_places_of_bits_are_found_however_many_there_are(share: float) -> None:
    places = np.flatnonzero(np.random.default_rng(7).random(5000) < share)
    assert list(bits(sum(1 << int(place) for place in places))) == places.tolist()
