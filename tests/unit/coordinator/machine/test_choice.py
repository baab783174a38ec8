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


def choosing(**values: object) -> State:
    """A run that may change to INT8 and begins without a profile."""
    state = rolling_out(**values)
    return replace(state, settings=replace(state.settings, profiles=("int8",)))


INT8, NONE = events.ProfileChosen(2, "int8"), events.ProfileChosen(3, "")


def test_a_chosen_profile_serves_with_the_next_policy_and_stays_until_another_is_chosen() -> None:
    state, sets = sets_of_a_step(chosen(choosing(), INT8))
    assert sets == [VersionSet(4, 1, 7, "int8")]
    assert state.profile is None
    state, sets = sets_of_a_step(state)
    assert sets == [VersionSet(5, 2, 7, "int8")]
    assert sets_of_a_step(chosen(state, NONE))[1] == [VersionSet(6, 3, 7)]


def test_a_rollback_of_the_drafter_keeps_the_profile_of_the_policy_that_serves() -> None:
    state = chosen(choosing(), INT8, ROLLBACK)
    assert sets_of_a_step(state)[1] == [VersionSet(4, 0, 4), VersionSet(5, 1, 4, "int8")]


def test_a_profile_that_is_taken_back_before_the_commit_leaves_nothing() -> None:
    assert chosen(choosing(), INT8, NONE) == choosing()


def test_the_policy_serves_without_a_profile_that_the_canary_refuses() -> None:
    state = chosen(choosing(promoted=8), INT8)
    state = chosen(state, events.TasksFinished(3, state.rollouts.epoch))
    state, issued = step(state, events.PolicyPrepared(4, state.learner.epoch, 1))
    tried = VersionSet(4, 1, 8, "int8")
    assert isinstance(issued[-1], commands.Commit)
    assert issued[-1].versions == tried
    state, issued = step(state, events.CommitFailed(5, tried, "log-probs are not finite"))
    assert issued == (commands.Commit(0, state.epoch, VersionSet(5, 1, 8)),)
    assert state.profile is None


@pytest.mark.parametrize("when", ["chosen", "serving"])
def test_a_profile_that_the_audit_finds_inexact_is_left_with_the_next_policy(when: str) -> None:
    state = chosen(choosing(), INT8)
    if when == "serving":
        state = sets_of_a_step(state)[0]
    number = state.step
    state = chosen(state, events.TasksFinished(3, state.rollouts.epoch))
    paths = events.PathsBeyondBound(4, state.learner.epoch, ("numbers=int8",))
    state = chosen(state, paths)
    state, issued = step(state, events.PolicyPrepared(5, state.learner.epoch, number + 1))
    assert isinstance(issued[-1], commands.Commit)
    assert issued[-1].versions.profile == ""
    against = objection(state, INT8)
    assert against is not None
    assert against.message == "the audit found it inexact"


def test_a_profile_that_the_run_did_not_name_is_refused_with_those_that_it_did() -> None:
    against = objection(choosing(), events.ProfileChosen(2, "fp8_tensor"))
    assert against is not None
    assert (against.seen, against.allowed) == ("fp8_tensor", "coordinator.profiles: int8")
    state = choosing()
    refusal = commands.Refuse("ProfileChosen", 0, 0)
    assert step(state, events.ProfileChosen(2, "fp8_tensor")) == (state, (refusal,))


def test_the_profile_of_the_start_may_be_left_and_not_taken_again_unless_it_is_named() -> None:
    state = step(State(), events.RunStarted(0, SETTINGS, VersionSet(3, 0, 7, "int8")))[0]
    state = step(state, events.StepBegan(1, 0))[0]
    state, sets = sets_of_a_step(chosen(state, NONE))
    assert sets == [VersionSet(4, 1, 7)]
    assert objection(state, INT8) is not None


def test_a_profile_that_the_engine_cannot_leave_stays_whoever_wants_another() -> None:
    settings = replace(SETTINGS, profile_stays=True)
    state = step(State(), events.RunStarted(0, settings, VersionSet(3, 0, 7, "int8_w8a8")))[0]
    state = step(state, events.StepBegan(1, 0))[0]
    against = objection(state, NONE)
    assert against is not None
    assert (against.seen, against.allowed) == ("", "int8_w8a8")
    paths = events.PathsBeyondBound(2, state.learner.epoch, ("numbers=int8_w8a8",))
    assert sets_of_a_step(chosen(state, paths))[1] == [VersionSet(4, 1, 7, "int8_w8a8")]
