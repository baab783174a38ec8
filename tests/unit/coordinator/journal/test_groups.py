"""The groups of a step, from its events."""

from __future__ import annotations

import pytest

from paceline.errors import InternalError
from paceline.services.coordinator.journal.groups import FIGURE, ClosedGroups, KnownGroup
from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.settings import RunSettings
from paceline.services.coordinator.machine.state import Portion, State
from paceline.services.coordinator.machine.step import step
from paceline.trajectory import VersionSet

WHOLE = [Portion(0)]
BEGUN: list[Event] = [
    events.RunStarted(0, RunSettings(workers=1, total_steps=3), VersionSet()),
    events.StepBegan(1, 0),
]


def observed(
    happened: list[Event], groups: ClosedGroups | None = None
) -> tuple[State, ClosedGroups]:
    state, groups = State(), groups or ClosedGroups()
    for event in happened:
        after = step(state, event)[0]
        groups.observe(state, event, after)
        state = after
    return state, groups


def sizes(groups: ClosedGroups, batch: list[Portion]) -> list[tuple[str, int]]:
    return [(one.group_id, one.sessions) for one in groups.of(batch)]


def finished(epoch: int, **closed: int) -> events.TasksFinished:
    return events.TasksFinished(2, epoch, {FIGURE: closed})


def test_the_groups_of_a_step_are_those_that_closed_with_its_rollouts_in_order() -> None:
    _, groups = observed([*BEGUN, finished(1, b=2, a=0)])
    assert sizes(groups, WHOLE) == [("b", 2), ("a", 0)]
    for other in (1, -1):
        with pytest.raises(InternalError, match="not known"):
            groups.of([Portion(other)])


def test_the_next_step_has_groups_of_its_own() -> None:
    happened = [
        *BEGUN,
        finished(1, a=2),
        events.PolicyPrepared(3, 2, 1),
        events.Committed(4, VersionSet(1, 1, 0)),
    ]
    state, groups = observed(happened)
    with pytest.raises(InternalError, match="not known"):
        groups.of(WHOLE)  # trained
    epoch = observed([*happened, events.StepBegan(5, 1)])[0].rollouts.epoch
    _, groups = observed([*happened, events.StepBegan(5, 1), finished(epoch, c=1)])
    assert sizes(groups, [Portion(1)]) == [("c", 1)]
    with pytest.raises(InternalError):
        groups.of(WHOLE)
    assert state.step == 1


def test_late_news_of_rollouts_that_were_begun_again_changes_nothing() -> None:
    again = [*BEGUN, events.WorkerLost(2, 1, 0)]
    epoch = observed(again)[0].rollouts.epoch
    _, groups = observed([*again, finished(1, old=9), finished(epoch, new=2), finished(1, old=9)])
    assert sizes(groups, WHOLE) == [("new", 2)]


def test_rollouts_that_told_of_no_group_leave_nothing_to_wait_for() -> None:
    _, groups = observed([*BEGUN, events.TasksFinished(2, 1)])
    assert groups.of(WHOLE) == []


def test_what_is_left_out_of_a_place_goes_with_it_to_the_trainer() -> None:
    settings = RunSettings(groups_per_step=2, dynamic_sampling_rounds=1)
    begun: list[Event] = [
        events.RunStarted(0, settings, VersionSet()),
        events.StepBegan(1, 0),
        events.TasksFinished(2, 1, {FIGURE: {"a": 2, "b": 3}}, 0b10),
    ]
    state, groups = observed(begun)
    with pytest.raises(InternalError, match="not known"):
        groups.of([Portion(1)])
    last = events.TasksFinished(3, state.rollouts.epoch, {FIGURE: {"c": 4}}, 0b10)
    _, groups = observed([*begun, last])
    known = [KnownGroup(0, "a", 2), KnownGroup(1, "b", 3, True), KnownGroup(1, "c", 4, True)]
    assert groups.of(WHOLE) == known
    assert groups.of([Portion(0, 0b10)]) == known[1:]
    again = ClosedGroups()
    again.take_up(groups.kept())
    assert again.of(WHOLE) == known


def test_groups_of_equal_rewards_are_kept_where_no_others_are_drawn() -> None:
    _, groups = observed([*BEGUN, events.TasksFinished(2, 1, {FIGURE: {"a": 2}}, 0b1)])
    assert groups.of(WHOLE) == [KnownGroup(0, "a", 2)]
