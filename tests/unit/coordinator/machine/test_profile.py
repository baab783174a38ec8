"""The profile of the start, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.settings import RunSettings
from paceline.services.coordinator.machine.state import State
from paceline.services.coordinator.machine.step import step
from paceline.trajectory import VersionSet


def rounded(*, stays: bool, former: int | None = None) -> State:
    """A run that begins with INT8, in the policy step; d7 serves after the drafter `former`."""
    settings = RunSettings(workers=1, total_steps=9, profile_stays=stays)
    state = step(State(), events.RunStarted(0, settings, VersionSet(3, 0, 7, "int8")))[0]
    state = replace(state, previous_drafter=former)
    state = step(state, events.StepBegan(1, 0))[0]
    return step(state, events.TasksFinished(2, state.rollouts.epoch))[0]


def prepared(state: State) -> tuple[State, commands.Command]:
    """The state with the next policy at the gateway, and the last command."""
    state, issued = step(state, events.PolicyPrepared(4, state.learner.epoch, 1))
    return state, issued[-1]


def test_a_rollback_of_the_drafter_keeps_the_profile_of_the_policy() -> None:
    state = step(rounded(stays=False, former=4), events.AcceptanceFell(3, 7))[0]
    state, commit = prepared(state)
    back = VersionSet(4, 0, 4, "int8")
    assert commit == commands.Commit(0, state.epoch, back)
    state, issued = step(state, events.Committed(5, back))
    assert issued == (commands.Commit(0, state.epoch, VersionSet(5, 1, 4, "int8")),)


@pytest.mark.parametrize(("stays", "profile"), [(False, ""), (True, "int8")])
def test_an_inexact_profile_is_left_with_the_next_policy_unless_the_engine_cannot(
    stays: bool, profile: str
) -> None:
    state = rounded(stays=stays)
    state = step(state, events.PathsBeyondBound(3, state.learner.epoch, ("numbers=int8",)))[0]
    state, commit = prepared(state)
    assert commit == commands.Commit(0, state.epoch, VersionSet(4, 1, 7, profile))
