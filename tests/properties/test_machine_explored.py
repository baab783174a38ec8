"""Every run of three workers and two steps, with every order of events and a bounded number of
faults.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from machine_world import Checks, Explored, Move, World, answers, explore

from paceline.services.coordinator.machine import (
    commands,
    events,
    rollout,
    rules,
    schedule,
)
from paceline.services.coordinator.machine.commands import Decision
from paceline.services.coordinator.machine.settings import Placement, RunSettings, Schedule
from paceline.services.coordinator.machine.slots import Holder, WorkerState
from paceline.services.coordinator.machine.state import MachineError, Phase, State
from paceline.services.coordinator.machine.step import EVENTS, rollout_call, step

THREE = RunSettings(workers=3, total_steps=2, training_interval_steps=1)
APART = replace(THREE, placement=Placement.DISAGGREGATED, learner_slots=1)
ONE_OFF = {"schedule": Schedule.ONE_STEP_OFF, "max_policy_lag": 1}
ASYNC = {"schedule": Schedule.FULLY_ASYNC, "max_policy_lag": 1, "groups_per_step": 1}
TWO_SLOTS = replace(THREE, max_drafter_slots=2)
JOINING = replace(THREE, total_steps=1, max_drafter_slots=2)
PROBED = replace(THREE, training_interval_steps=2, probe_enabled=True, probe_every=1)
SERIAL = replace(THREE, serial_drafter=True)
CHOOSY = {"dynamic_sampling_rounds": 1}
SETTINGS = {
    "sync": (replace(THREE, workers=2, train_during_push=True), 0),
    "sync, no training during a push": (replace(THREE, workers=2), 0),
    "sync, two slots for the drafter": (TWO_SLOTS, 0),
    "sync, slots that join the drafter": (JOINING, 0),
    "sync, the drafter in every second step, with probes": (PROBED, 0),
    "sync, serial drafter": (SERIAL, 1),
    "sync, no drafter, with accuracy": (
        replace(THREE, drafter_enabled=False, accuracy_enabled=True),
        3,
    ),
    "sync, disaggregated": (APART, 0),
    "sync, disaggregated, slots that join the drafter": (
        replace(APART, workers=2, max_drafter_slots=2),
        0,
    ),
    "one_step_off, colocated": (replace(THREE, **ONE_OFF), 0),
    "one_step_off, disaggregated": (replace(APART, **ONE_OFF), 0),
    "sync, groups drawn again": (replace(THREE, **CHOOSY, workers=2), 0),
    "sync, groups drawn again, no drafter, with faults": (
        replace(THREE, **CHOOSY, workers=1, drafter_enabled=False, groups_per_step=2),
        2,
    ),
    "one_step_off, groups drawn again": (replace(APART, **ONE_OFF, **CHOOSY, workers=1), 0),
    "fully_async, groups drawn again": (
        replace(THREE, **ASYNC, **CHOOSY, workers=1, drafter_enabled=False),
        0,
    ),
    "fully_async, colocated": (replace(THREE, **ASYNC, drafter_enabled=False), 0),
    "fully_async, disaggregated": (replace(APART, **ASYNC, drafter_enabled=False), 0),
}
"""Settings, and faults of a run at most."""
DEEPER = {
    "sync": (replace(THREE, workers=2), 1),
    "sync, the drafter during a push": (
        replace(JOINING, total_steps=2, train_during_push=True),
        0,
    ),
    "sync, slots that join the drafter": (JOINING, 1),
    "sync, serial drafter": (replace(SERIAL, workers=2), 2),
    "one_step_off, colocated": (replace(THREE, **ONE_OFF, workers=1), 2),
    "one_step_off, disaggregated": (replace(APART, **ONE_OFF, workers=1), 1),
    "fully_async, colocated": (replace(THREE, **ASYNC, workers=1), 1),
    "fully_async, colocated, no drafter": (
        replace(THREE, **ASYNC, workers=2, drafter_enabled=False),
        1,
    ),
    "fully_async, groups drawn again, one fault": (
        replace(THREE, **ASYNC, **CHOOSY, workers=1, drafter_enabled=False),
        1,
    ),
    "fully_async, colocated, groups drawn again": (
        replace(THREE, **ASYNC, **CHOOSY, workers=2, drafter_enabled=False),
        0,
    ),
    "fully_async, two groups a step, drawn again": (
        replace(
            APART,
            **{**ASYNC, "groups_per_step": 2},
            **CHOOSY,
            workers=1,
            drafter_enabled=False,
        ),
        0,
    ),
    "fully_async, two groups a step": (
        replace(APART, **{**ASYNC, "groups_per_step": 2}, drafter_enabled=False),
        0,
    ),
}
"""Like SETTINGS, for runs of minutes."""
PAUSED = {
    "sync, with probes": (replace(PROBED, workers=2), 0),
    "sync, serial drafter": (replace(SERIAL, workers=2), 0),
    "one_step_off, disaggregated": (replace(APART, **ONE_OFF, workers=1), 0),
    "fully_async, colocated": (replace(THREE, **ASYNC, workers=1), 0),
}
"""Like SETTINGS, for runs that an operator pauses."""
FEWEST_STATES = 30_000
ANSWERED = (
    commands.RunTasks,
    commands.TrainPolicy,
    commands.Evaluate,
    commands.SaveCheckpoints,
)


def check_state(state: State) -> None:
    """Check the invariants of every state."""
    one_holder_a_slot(state)
    lag_is_bounded(state)
    training_starts_when_the_rules_allow(state)
    groups_are_drawn_again_within_bounds(state)


def check_change(before: State, after: State) -> None:
    """Check the invariants of a transition."""
    numbers_only_grow(before, after)
    a_trajectory_has_one_version(before, after)
    a_set_is_tried_on_a_slot_of_nobody(before, after)
    nothing_begins_in_a_pause(before, after)


def one_holder_a_slot(state: State) -> None:
    leased = set(state.lease.slots) if state.lease else set()
    assert set(state.slots.where(Holder.DRAFTER)) == leased
    interrupted = any(not draw.called for draw in state.rollouts.running)
    for worker, worker_state in enumerate(state.workers):
        holder = state.slots[worker].holder
        assert (worker_state is WorkerState.TRAINING) == (holder is Holder.DRAFTER)
        if state.phases & {Phase.ROLLOUT, Phase.SUSPENDED} and not interrupted:
            assert (worker_state is WorkerState.GENERATING) == (holder is Holder.ENGINE)
    for slot in state.slots.where(Holder.POLICY):
        assert slot in state.settings.policy_slots
    if state.phases & {Phase.EVALUATE, Phase.CLOSING, Phase.FINISHED}:
        assert state.lease is None
    if state.settings.colocated and state.slots.counted(Holder.POLICY):
        assert state.lease is None
        assert not state.workers.counted(WorkerState.GENERATING)


def numbers_only_grow(before: State, after: State) -> None:
    for old, new in zip(before.slots, after.slots, strict=True):
        assert old.epoch <= new.epoch <= after.epoch
        if new.holder is not old.holder and new.holder is not Holder.NONE:
            assert new.epoch > old.epoch
    assert after.epoch >= before.epoch
    assert after.step >= before.step
    if after.versions != before.versions:
        assert after.versions.seq > before.versions.seq
        assert after.versions.policy >= before.versions.policy


def duplicates_change_nothing(world: World, move: Move, after: World) -> None:
    """A repeated event and late messages of its ended calls change nothing."""
    repeated = [] if isinstance(move.event, events.Resumed) else [move.event]
    ended = [one for one in world.calls if one not in move.calls]
    if not isinstance(move.event, events.Resumed | events.ServiceLost):
        repeated += [
            event
            for one in ended
            if isinstance(one.command, ANSWERED) and one.kind not in {c.kind for c in move.calls}
            for event, _ in answers(one, world.state)
        ]
    for event in repeated:
        state, issued = step(after.state, event)
        assert state == after.state, f"{event} changes something"
        assert all(isinstance(command, commands.Refuse) for command in issued)


def lag_is_bounded(state: State) -> None:
    """No draw begins too early, and nothing that has closed is left to become too old."""
    lag, settings = state.settings.max_policy_lag, state.settings
    for draw in state.rollouts.draws:
        assert draw.step - draw.version <= lag
        assert state.step - draw.version <= lag or settings.schedule is Schedule.FULLY_ASYNC
        waits = draw.closed & ~draw.taken
        if state.learner.batch and waits:
            assert state.step + 1 - draw.version <= lag, "trained next, it would be dropped"


def a_trajectory_has_one_version(before: State, after: State) -> None:
    """Only the fully asynchronous schedule commits a set during rollouts; other schedules commit
    after.
    """
    if after.settings.schedule is Schedule.FULLY_ASYNC:
        return
    if after.committing is not None and before.committing is None:
        assert not after.rollouts.running or after.rollouts.damaged
    if after.committing is not None:
        assert not any(draw.called for draw in after.rollouts.draws)


def a_set_is_tried_on_a_slot_of_nobody(before: State, after: State) -> None:
    """The drafter leaves a worker to try it, and gets no other until the set serves."""
    if after.committing is None:
        return
    had = set(before.lease.slots) if before.lease else set()
    assert not after.lease or set(after.lease.slots) <= had
    if before.committing is None and len(after.workers) > 1:
        left = len(after.workers) - after.workers.counted(WorkerState.TRAINING)
        assert left > 0, "nobody tries the set"


def nothing_begins_in_a_pause(before: State, after: State) -> None:
    """No tasks, no evaluation; at rest the engine has all workers and the drafter none."""
    if after.paused and before.paused:
        assert after.rollouts.begun <= before.rollouts.begun
        over = after.step >= after.settings.total_steps
        goes_on = (before.phase, before.evaluations) == (after.phase, after.evaluations)
        assert over or goes_on or after.phase is not Phase.EVALUATE
    if after.phase is Phase.PAUSED:
        assert after.paused
        assert after.lease is None
        assert after.slots.counted(Holder.ENGINE) == after.settings.engine_slots
        assert not after.rollouts.running


def training_starts_when_the_rules_allow(state: State) -> None:
    if state.phase is not Phase.RUNNING:
        return
    settings, workers = state.settings, state.workers
    computing = workers.counted(WorkerState.GENERATING) or (
        not settings.colocated and state.learner.phase is not Phase.IDLE
    )
    drafter_may = (
        settings.drafter_enabled
        and not settings.serial_drafter
        and state.step % settings.training_interval_steps == 0
        and not state.lost
        and state.committing is None
        and computing
        and workers.counted(WorkerState.RELEASED)
    )
    assert state.lease is not None or state.drafter_benched or not drafter_may
    draws = state.rollouts.draws
    closed = sum((draw.closed & ~draw.taken).bit_count() for draw in draws)
    ended = any(draw.finished and draw.step == state.step for draw in draws)
    fully = settings.schedule is Schedule.FULLY_ASYNC
    there = closed >= settings.groups_per_step if fully else ended
    free = not settings.colocated or fully or not state.rollouts.running
    assert state.learner.phase is not Phase.IDLE or not (there and free)


def groups_are_drawn_again_within_bounds(state: State) -> None:
    """No group is trained that must be drawn again, and no place is empty at the end."""
    everything = (1 << state.settings.groups_per_step) - 1
    for draw in state.rollouts.draws:
        assert draw.round <= state.settings.dynamic_sampling_rounds
        assert draw.places & everything == draw.places != 0
        assert draw.closed | draw.places == everything
        assert draw.taken & ~draw.closed == 0
        assert draw.closed == everything or not draw.finished


CHECKS = Checks(check_state, check_change, duplicates_change_nothing)


def leads_on(explored: Explored) -> None:
    """From every world the run can end without another fault, and every lease can end."""
    ending = explored.lead_to(lambda state: state.phase is Phase.FINISHED)
    stuck = [world for i, world in enumerate(explored.worlds) if i not in ending]
    assert not stuck, stuck[0]
    assert all(
        world.state.lease is None and not world.state.rollouts.draws
        for world in explored.worlds
        if world.state.phase is Phase.FINISHED
    )


@pytest.mark.slow
def test_no_order_of_events_and_faults_breaks_a_rule_or_stops_a_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert explored_states(SETTINGS, capsys) >= FEWEST_STATES


@pytest.mark.slow
@pytest.mark.fuzz
def test_nor_does_any_order_with_more_faults_or_more_groups(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert explored_states(DEEPER, capsys) >= FEWEST_STATES


@pytest.mark.slow
def test_nor_does_an_operator_who_pauses_the_run_at_any_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert explored_states(PAUSED, capsys, pauses=2) >= FEWEST_STATES / 10


def explored_states(
    runs: dict[str, tuple[RunSettings, int]],
    capsys: pytest.CaptureFixture[str],
    pauses: int = 0,
) -> int:
    states = 0
    for name, (settings, faults) in runs.items():
        explored = explore(settings, faults, CHECKS, pauses)
        leads_on(explored)
        states += len(explored.worlds)
        with capsys.disabled():
            print(f"\n{name}: {len(explored.worlds):,} states, {explored.moves:,} moves", end="")
    return states


def found(
    monkeypatch: pytest.MonkeyPatch, settings: RunSettings, says: str, pauses: int = 0
) -> None:
    with pytest.raises((AssertionError, MachineError), match=says):
        leads_on(explore(settings, 0, CHECKS, pauses))


def test_the_explorer_finds_a_drafter_that_is_not_told_of_released_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "RULES", rules.RULES[:-1])
    found(monkeypatch, THREE, "ShareDone")


def test_the_explorer_finds_a_share_that_is_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    late = EVENTS[events.ShareDone]._replace(late=rollout_call)
    monkeypatch.setitem(EVENTS, events.ShareDone, late)
    found(monkeypatch, THREE, "ShareDone")


def test_the_explorer_finds_tasks_that_are_drawn_a_step_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = schedule.capacity
    monkeypatch.setattr(schedule, "capacity", lambda **of: right(**of) + of["batch"])
    found(
        monkeypatch,
        replace(APART, total_steps=3, **ONE_OFF),
        "draw.step - draw.version|StepBegan|assert",
    )


def test_the_explorer_finds_a_commit_that_does_not_wait_for_rollouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule, "may_commit", lambda state: True)
    found(monkeypatch, replace(APART, **ONE_OFF), "Committed|PolicyPrepared")


def test_the_explorer_finds_groups_that_are_drawn_again_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout, "draws_again", lambda state, draw: True)
    found(monkeypatch, replace(THREE, **CHOOSY, workers=1), "assert 2 <= 1")


def test_the_explorer_finds_a_group_that_is_trained_and_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closed_at_once(state: State, event: events.GroupClosed) -> Decision:
        return right(state, replace(event, equal_rewards=False))

    right = rollout.group_closed
    row = EVENTS[events.GroupClosed]
    monkeypatch.setitem(EVENTS, events.GroupClosed, row._replace(handle=closed_at_once))
    choosy = replace(APART, **ASYNC, **CHOOSY, workers=1, drafter_enabled=False)
    found(monkeypatch, choosy, "taken|MachineError|assert")


def test_the_explorer_finds_a_set_that_nobody_can_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "can_judge", lambda state: True)
    several = replace(APART, workers=2, max_drafter_slots=2)
    found(monkeypatch, several, "nobody tries")


def test_the_explorer_finds_tasks_that_are_drawn_in_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = schedule.may_draw
    monkeypatch.setattr(schedule, "may_draw", lambda state: right(replace(state, paused=False)))
    found(monkeypatch, replace(THREE, workers=1), "begun", pauses=1)


def test_the_explorer_finds_a_pause_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stays = tuple(rule for rule in rules.RULES if rule is not rules.go_on)
    monkeypatch.setattr(rules, "RULES", stays)
    found(monkeypatch, replace(THREE, workers=1), "State", pauses=1)


def test_the_explorer_finds_rollouts_that_are_never_taken_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stays = tuple(rule for rule in rules.RULES if rule is not rules.roll_out)
    monkeypatch.setattr(rules, "RULES", stays)
    found(monkeypatch, replace(THREE, **ASYNC, drafter_enabled=False), "State")
