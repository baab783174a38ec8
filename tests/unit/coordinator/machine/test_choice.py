"""An operator's choice of a drafter, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.choice import objection
from paceline.services.coordinator.machine.settings import RunSettings
from paceline.services.coordinator.machine.state import LearnerTrack, Phase, State
from paceline.services.coordinator.machine.step import step
from paceline.trajectory import VersionSet

SETTINGS = RunSettings(workers=1, total_steps=9)
ROLLBACK = events.DrafterChosen(2, None, lasting=False)
PIN = events.DrafterChosen(2, None, lasting=True)


def rolling_out(**values: object) -> State:
    """d7 serves, d4 has served before it."""
    state = step(State(), events.RunStarted(0, SETTINGS, VersionSet(3, 0, 7)))[0]
    state = replace(state, previous_drafter=4, **values)  # type: ignore[arg-type]
    return step(state, events.StepBegan(1, 0))[0]


def sets_of_a_step(state: State) -> tuple[State, list[VersionSet]]:
    """The state in the next step's rollout, and the sets that were committed on the way."""
    number, served = state.step, list[VersionSet]()
    waiting: tuple[commands.Command, ...] = (
        commands.RunTasks(number, state.rollouts.epoch, state.versions),
    )
    while waiting:
        match waiting[0]:
            case commands.RunTasks(began, epoch) if began == number:
                event: events.Event = events.TasksFinished(1, epoch)
            case commands.TrainPolicy(_, epoch, _, version):
                event = events.PolicyPrepared(1, epoch, version + 1)
            case commands.Commit(_, _, versions):
                served.append(versions)
                event = events.Committed(1, versions)
            case commands.BeginStep(following):
                event = events.StepBegan(1, following)
            case commands.RunTasks():
                break
            case _:
                waiting = waiting[1:]
                continue
        state, waiting = step(state, event)
    return state, served


def chosen(state: State, *happened: events.Event) -> State:
    for event in happened:
        state = step(state, event)[0]
    return state


def test_a_rollback_serves_the_former_drafter_before_the_next_policy_and_for_a_step() -> None:
    state, sets = sets_of_a_step(chosen(rolling_out(), ROLLBACK))
    assert sets == [VersionSet(4, 0, 4), VersionSet(5, 1, 4)]
    assert (state.pin, state.previous_drafter) == (None, None)


def test_a_candidate_waits_for_a_step_when_an_operator_has_rolled_back() -> None:
    state = chosen(rolling_out(promoted=8), ROLLBACK)
    state, first = sets_of_a_step(state)
    assert [versions.drafter for versions in first] == [4, 4]
    assert sets_of_a_step(state)[1] == [VersionSet(6, 2, 8)]


def test_a_pinned_drafter_serves_until_it_is_unpinned_and_then_the_newest_candidate() -> None:
    state = chosen(rolling_out(promoted=8), PIN)
    for policy in (1, 2):
        state, sets = sets_of_a_step(state)
        assert sets == [VersionSet(3 + policy, policy, 7)]
    state = replace(state, promoted=9)
    state, sets = sets_of_a_step(chosen(state, events.DrafterUnpinned(3)))
    assert sets == [VersionSet(6, 3, 9)]
    assert (state.promoted, state.previous_drafter) == (None, 7)


def test_a_pin_names_the_former_drafter_and_serves_it_with_the_next_commit() -> None:
    state = chosen(rolling_out(promoted=8), events.DrafterChosen(2, 4, lasting=True))
    state, sets = sets_of_a_step(state)
    assert sets == [VersionSet(4, 0, 4), VersionSet(5, 1, 4)]
    assert sets_of_a_step(state)[1] == [VersionSet(6, 2, 4)]


def test_acceptance_that_falls_changes_nothing_of_a_pinned_drafter() -> None:
    state = chosen(rolling_out(), PIN)
    after, issued = step(state, events.AcceptanceFell(3, 7))
    assert (after, issued) == (state, (commands.Refuse("AcceptanceFell", 7, 7),))


def test_a_rollback_that_is_due_is_withdrawn_by_unpin_or_by_the_serving_version() -> None:
    due = chosen(rolling_out(), ROLLBACK)
    assert due.pin is not None
    for event in (events.DrafterUnpinned(3), events.DrafterChosen(3, 7, lasting=False)):
        assert chosen(due, event) == rolling_out()


def test_what_is_asked_for_twice_is_asked_for_once() -> None:
    for event in (ROLLBACK, PIN, events.DrafterChosen(2, 4, lasting=True)):
        once = chosen(rolling_out(), event)
        assert step(once, event) == (once, ())
    back = sets_of_a_step(chosen(rolling_out(), ROLLBACK))[0]
    assert step(back, events.DrafterChosen(9, 4, lasting=False)) == (back, ())


def test_a_drafter_that_is_gone_is_not_pinned_any_longer_and_the_policy_is_served() -> None:
    state = chosen(rolling_out(), events.DrafterChosen(2, 4, lasting=True))
    state = chosen(state, events.TasksFinished(3, state.rollouts.epoch))
    state, issued = step(state, events.PolicyPrepared(4, state.learner.epoch, 1))
    assert isinstance(issued[-1], commands.Commit)
    assert issued[-1].versions == VersionSet(4, 0, 4)
    state, issued = step(state, events.CommitFailed(5, VersionSet(4, 0, 4), "gone"))
    assert issued == (commands.Commit(0, state.epoch, VersionSet(5, 1, 7)),)
    assert state.pin is None


COMMITTING_ANOTHER = {
    "learner": LearnerTrack(Phase.COMMIT),
    "committing": VersionSet(4, 1, 8),
    "prepared": 1,
}


@pytest.mark.parametrize(
    ("changed", "event", "message"),
    [
        ({"previous_drafter": None}, ROLLBACK, "no drafter to go back to"),
        ({}, events.DrafterChosen(2, 5, lasting=False), "no such drafter version"),
        ({}, events.DrafterChosen(2, 5, lasting=True), "no such drafter version"),
        (COMMITTING_ANOTHER, ROLLBACK, "another drafter is being committed"),
        (COMMITTING_ANOTHER, PIN, "another drafter is being committed"),
        ({"learner": LearnerTrack(step=9), "phase": Phase.CLOSING}, PIN, "no commit follows"),
        ({"learner": LearnerTrack(step=9), "phase": Phase.EVALUATE}, ROLLBACK, "no commit follows"),
        ({"learner": LearnerTrack(Phase.COMMIT, step=8), "prepared": 1}, PIN, "no commit follows"),
    ],
)
def test_what_cannot_be_chosen_is_refused_with_the_reason(
    changed: dict[str, object], event: events.DrafterChosen, message: str
) -> None:
    state = replace(rolling_out(), **changed)  # type: ignore[arg-type]
    against = objection(state, event)
    assert against is not None
    assert message in against.message
    assert step(state, event) == (
        state,
        (commands.Refuse("DrafterChosen", 0, 0),),
    )


def test_nothing_is_rolled_back_while_a_drafter_is_pinned() -> None:
    state = chosen(rolling_out(), PIN)
    against = objection(state, ROLLBACK)
    assert against is not None
    assert against == ("a drafter is pinned", "d7", "unpin it first")
    assert step(state, ROLLBACK)[0] == state


# ---- profiles


def rounded(*, stays: bool) -> State:
    """A run that begins with INT8."""
    settings = replace(SETTINGS, profile_stays=stays)
    state = step(State(), events.RunStarted(0, settings, VersionSet(3, 0, 7, "int8")))[0]
    return step(state, events.StepBegan(1, 0))[0]


def test_a_rollback_of_the_drafter_keeps_the_profile_of_the_policy_that_serves() -> None:
    state = replace(rounded(stays=False), previous_drafter=4)
    sets = sets_of_a_step(chosen(state, ROLLBACK))[1]
    assert sets == [VersionSet(4, 0, 4, "int8"), VersionSet(5, 1, 4, "int8")]


@pytest.mark.parametrize(("stays", "profile"), [(False, ""), (True, "int8")])
def test_an_inexact_profile_is_left_with_the_next_policy_unless_the_engine_cannot(
    stays: bool, profile: str
) -> None:
    state = rounded(stays=stays)
    state = chosen(state, events.TasksFinished(2, state.rollouts.epoch))
    state = chosen(state, events.PathsBeyondBound(3, state.learner.epoch, ("numbers=int8",)))
    issued = step(state, events.PolicyPrepared(4, state.learner.epoch, 1))[1]
    assert isinstance(issued[-1], commands.Commit)
    assert issued[-1].versions == VersionSet(4, 1, 7, profile)
