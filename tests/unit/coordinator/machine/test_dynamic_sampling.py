"""Groups of equal rewards are drawn again, round by round."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.settings import Placement, RunSettings, Schedule
from paceline.services.coordinator.machine.state import MachineError, Phase, Portion, State
from paceline.services.coordinator.machine.step import step
from paceline.trajectory import VersionSet

TWO_ROUNDS = RunSettings(
    workers=1, total_steps=2, groups_per_step=3, dynamic_sampling_rounds=2, drafter_enabled=False
)
ASYNC = replace(
    TWO_ROUNDS,
    schedule=Schedule.FULLY_ASYNC,
    max_policy_lag=1,
    placement=Placement.DISAGGREGATED,
    learner_slots=1,
)


def begun(settings: RunSettings) -> State:
    return run(State(), events.RunStarted(0, settings, VersionSet()), events.StepBegan(1, 0))[0]


def run(state: State, *happened: Event) -> tuple[State, list[commands.Command]]:
    issued: list[commands.Command] = []
    for event in happened:
        state, more = step(state, event)
        issued += more
    return state, issued


def finished(epoch: int, equal: int = 0) -> events.TasksFinished:
    return events.TasksFinished(2, epoch, {}, equal)


def asked(issued: list[commands.Command]) -> list[tuple[int, int, int]]:
    return [
        (one.epoch, one.round, one.places) for one in issued if isinstance(one, commands.RunTasks)
    ]


def test_other_tasks_are_called_for_the_places_that_have_nothing_to_teach_and_for_no_others() -> (
    None
):
    state, issued = run(begun(TWO_ROUNDS), finished(1, 0b101))
    assert asked(issued) == [(state.rollouts.epoch, 1, 0b101)]
    assert (state.rollouts.phase, state.learner.phase) == (Phase.ROLLOUT, Phase.IDLE)
    state, issued = run(state, finished(state.rollouts.epoch, 0b100))
    assert asked(issued) == [(state.rollouts.epoch, 2, 0b100)]
    state, issued = run(state, finished(state.rollouts.epoch))
    assert asked(issued) == []
    assert [type(one) for one in issued] == [commands.TrainPolicy]
    assert state.learner.batch == (Portion(0),)


def test_after_the_last_round_the_step_is_trained_without_what_is_left() -> None:
    state = begun(TWO_ROUNDS)
    for _ in range(2):
        state, issued = run(state, finished(state.rollouts.epoch, 0b111))
        assert [type(one) for one in issued] == [commands.RunTasks]
    state, issued = run(state, finished(state.rollouts.epoch, 0b111))
    assert [type(one) for one in issued] == [commands.TrainPolicy]


def test_without_rounds_groups_of_equal_rewards_are_kept() -> None:
    state = begun(replace(TWO_ROUNDS, dynamic_sampling_rounds=0))
    _, issued = run(state, finished(1, 0b111))
    assert [type(one) for one in issued] == [commands.TrainPolicy]


def test_a_round_that_is_lost_is_called_again_with_the_same_places() -> None:
    state, _ = run(begun(TWO_ROUNDS), finished(1, 0b010))
    state, issued = run(state, events.WorkerLost(3, state.rollouts.epoch, 0))
    assert asked(issued) == [(state.rollouts.epoch, 1, 0b010)]
    state, issued = run(state, events.Resumed(4, 2))
    assert asked(issued) == [(state.rollouts.epoch, 1, 0b010)]


def closed(epoch: int, place: int, *, equal: bool = False) -> events.GroupClosed:
    return events.GroupClosed(2, epoch, place, f"g{place}", 2, equal)


def test_a_group_that_will_be_drawn_again_is_not_trained_as_it_closes() -> None:
    state, _ = run(begun(ASYNC), closed(1, 0), closed(1, 1, equal=True), closed(1, 2))
    assert state.rollouts.draws[0].closed == 0b101
    assert state.learner.phase is Phase.IDLE
    state, issued = run(state, finished(1, 0b010))
    (call,) = asked(issued)
    assert call[1:] == (1, 0b010)
    state, issued = run(state, closed(call[0], 1))
    assert type(issued[0]) is commands.TrainPolicy
    assert state.learner.batch == (Portion(0, 0b111),)


def test_in_the_last_round_a_place_closes_with_whatever_it_has() -> None:
    state, _ = run(begun(replace(ASYNC, dynamic_sampling_rounds=1)), finished(1, 0b010))
    state, _ = run(state, closed(state.rollouts.draws[0].epoch, 1, equal=True))
    assert state.learner.batch == (Portion(0, 0b111),)


def test_a_group_that_the_round_has_not_drawn_cannot_close() -> None:
    state, _ = run(begun(ASYNC), finished(1, 0b010))
    with pytest.raises(MachineError, match="index=3"):
        step(state, closed(state.rollouts.draws[0].epoch, 3))
