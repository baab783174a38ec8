"""Paths beyond their bounds: each is quarantined once, and the run continues."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.settings import CommitMode, RunSettings
from paceline.services.coordinator.machine.state import Phase, State
from paceline.services.coordinator.machine.step import step
from paceline.trajectory import SWAPPED_PATH, VersionSet

SETTINGS = RunSettings(workers=1, total_steps=2, drafter_enabled=False)


def training() -> State:
    """Its policy step has been called."""
    state = step(State(), events.RunStarted(0, SETTINGS, VersionSet()))[0]
    state = step(state, events.StepBegan(1, 0))[0]
    state = step(state, events.TasksFinished(2, state.rollouts.epoch))[0]
    assert Phase.POLICY in state.phases
    return state


def beyond(state: State, *paths: str) -> tuple[State, tuple[commands.Command, ...]]:
    return step(state, events.PathsBeyondBound(3, state.learner.epoch, paths))


def test_paths_are_quarantined_in_the_order_in_which_they_were_found_and_once() -> None:
    state, issued = beyond(training(), "reused", "reused")
    epoch = state.learner.epoch
    assert issued == (commands.Quarantine(0, epoch, ("reused",)),)
    state, issued = beyond(state, "arm=eagle:3_1_4", "reused")
    assert issued == (commands.Quarantine(0, epoch, ("reused", "arm=eagle:3_1_4")),)
    assert beyond(state, "reused") == (state, ())


def test_the_step_goes_on_as_without_them() -> None:
    plain = training()
    state, _ = beyond(plain, "reused")
    for one in (
        events.PolicyStepped(4, plain.learner.epoch, 1),
        events.PolicyPrepared(5, plain.learner.epoch, 1),
    ):
        plain, expected = step(plain, one)
        state, issued = step(state, one)
        assert issued == expected
    assert replace(state, quarantined=()) == plain
    assert state.quarantined == ("reused",)


def test_news_of_an_older_call_changes_nothing() -> None:
    state = training()
    late = events.PathsBeyondBound(3, state.learner.epoch - 1, ("reused",))
    after, issued = step(state, late)
    assert after == state
    assert [type(one) for one in issued] == [commands.Refuse]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (CommitMode.IN_PLACE, CommitMode.RETRACT),
        (CommitMode.RETRACT, CommitMode.RETRACT),
        (CommitMode.ABORT, CommitMode.ABORT),
    ],
)
def test_where_old_keys_are_inexact_they_are_made_anew_with_each_commit(
    mode: CommitMode, expected: CommitMode
) -> None:
    state = replace(training(), settings=replace(SETTINGS, commit_mode=mode))
    assert beyond(state, "reused")[0].commit_mode is mode
    assert beyond(state, SWAPPED_PATH)[0].commit_mode is expected
