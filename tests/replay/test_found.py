"""Runs that once broke the coordinator's machine, replayed event by event from their journals."""

from __future__ import annotations

from dataclasses import replace

from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.commands import Command
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.settings import Placement, RunSettings, Schedule
from paceline.services.coordinator.machine.state import Phase, Service, State
from paceline.services.coordinator.machine.step import step
from paceline.trajectory import VersionSet

SYNC = RunSettings(workers=2, total_steps=2, training_interval_steps=1)
APART = RunSettings(
    workers=1,
    total_steps=3,
    drafter_enabled=False,
    schedule=Schedule.FULLY_ASYNC,
    placement=Placement.DISAGGREGATED,
    learner_slots=1,
    max_policy_lag=1,
)
ONE_OFF = replace(
    APART, schedule=Schedule.ONE_STEP_OFF, placement=Placement.COLOCATED, learner_slots=0
)
TURNS = replace(SYNC, schedule=Schedule.FULLY_ASYNC, max_policy_lag=1)


def replayed(settings: RunSettings, *happened: Event) -> tuple[State, tuple[Command, ...]]:
    """The state after a journal, and the commands of its last event."""
    state, issued = step(State(), events.RunStarted(0, settings, VersionSet()))
    for event in happened:
        state, issued = step(state, event)
    return state, issued


def test_a_share_that_is_told_of_twice_is_refused() -> None:
    """The repeated event had ended the coordinator."""
    once = (events.StepBegan(1, 0), events.ShareDone(2, 1, 0))
    before, _ = replayed(SYNC, *once)
    after, issued = replayed(SYNC, *once, events.ShareDone(3, 1, 0))
    assert after == before
    assert [type(one) for one in issued] == [commands.Refuse]


def test_a_step_that_is_trained_before_its_last_sample_is_told_of_is_forgotten() -> None:
    """The coordinator had kept each such step for ever."""
    state, _ = replayed(
        APART,
        events.StepBegan(1, 0),
        events.StepBegan(2, 1),
        events.GroupClosed(3, 1, 0, "s0.t0", 1),
        events.PolicyStepped(4, 3, 1),
        events.PolicyPrepared(5, 3, 1),
        events.Committed(6, VersionSet(1, 1, 0)),
        events.TasksFinished(7, 1),
    )
    assert [draw.step for draw in state.rollouts.draws] == [1]


def test_a_push_that_dies_while_rollouts_wait_for_its_set_is_made_again() -> None:
    """Rollouts had waited for the set, and the trainer for the slots of the rollouts."""
    state, issued = replayed(
        ONE_OFF,
        events.StepBegan(1, 0),
        events.TasksFinished(2, 1),
        events.PolicyStepped(3, 2, 1),
        events.StepBegan(4, 1),
        events.SetDamaged(5, 3),
        events.TrainerFailed(6, 2, Service.POLICY_TRAINER, "rank 0 died"),
    )
    assert [type(one) for one in issued] == [commands.TrainPolicy]
    assert state.rollouts.phase is Phase.SUSPENDED


def test_a_worker_that_the_drafter_had_is_lent_again_after_the_policys_turn() -> None:
    """Its slot had been idle until tasks were drawn; at the end of a run, until the run's end."""
    _, issued = replayed(
        TURNS,
        events.StepBegan(1, 0),
        events.StepBegan(2, 1),
        events.ShareDone(3, 1, 0),
        events.ShareDone(4, 2, 0),
        events.GroupClosed(5, 1, 0, "s0.t0", 1),
        events.Preempted(6, 3),
        events.PolicyPrepared(7, 4, 1),
        events.Committed(8, VersionSet(1, 1, 0)),
    )
    assert [type(one) for one in issued[-2:]] == [commands.ResumeWorkers, commands.ActivateDrafter]
