"""Every run of three workers and two steps, with every order of events and up to so many faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machine_world import Explored, Move, World, answers, explore

from coordinator.machine import commands, drafter, events
from coordinator.machine.decision import Decision
from coordinator.machine.state import (
    OPTIONAL,
    Holder,
    MachineError,
    Phase,
    RunSettings,
    State,
    WorkerState,
)
from coordinator.machine.step import EVENTS, call, step

THREE = RunSettings(workers=3, total_steps=2, training_interval_steps=1)
SCHEDULES = {
    "harvest": (THREE, 1),
    "harvest of two slots": (replace(THREE, min_workers_for_training=2, max_drafter_slots=2), 1),
    "harvest in every second step, with probes": (
        replace(THREE, training_interval_steps=2, probe_enabled=True, probe_every=1),
        1,
    ),
    "serial": (replace(THREE, serial_drafter=True), 3),
    "no drafter, with accuracy": (
        replace(THREE, drafter_enabled=False, accuracy_enabled=True),
        3,
    ),
}
"""Settings, and faults of a run at most."""
FEWEST_STATES = 30_000
AT_REST = (Phase.READY, Phase.EVALUATE, Phase.POLICY, Phase.COMMIT, Phase.CLOSING, Phase.FINISHED)
ANSWERED = (commands.RunTasks, commands.TrainPolicy, commands.Evaluate, commands.SaveCheckpoints)
LEASING = (events.ShareDone, events.Detached, events.Preempted, events.ServiceBack)


def check(world: World, move: Move, after: World) -> None:
    """What holds of every move."""
    try:
        one_holder_a_slot(after.state)
        numbers_only_grow(world.state, after.state)
        duplicates_change_nothing(world, move, after)
        if after.state != world.state:  # it was not too late
            training_starts_when_the_rules_allow(move, after.state)
    except AssertionError as error:
        error.add_note(f"{move.event} in {world.state} with {world.calls} gives {after.state}")
        raise


def one_holder_a_slot(state: State) -> None:
    leased = set(state.lease.slots) if state.lease else set()
    assert set(state.slots.where(Holder.DRAFTER)) == leased
    for worker, worker_state in enumerate(state.workers):
        holder = state.slots[worker].holder
        assert (worker_state is WorkerState.TRAINING) == (holder is Holder.DRAFTER)
        if state.phase is Phase.ROLLOUT and not state.lost - OPTIONAL and not state.rollout_restart:
            assert (worker_state is WorkerState.GENERATING) == (holder is Holder.ENGINE)
    if state.phase in AT_REST:
        assert state.lease is None


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
    """The event itself a second time, and what its call still had to say."""
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


def training_starts_when_the_rules_allow(move: Move, state: State) -> None:
    if state.phase is not Phase.ROLLOUT or not isinstance(move.event, LEASING):
        return
    settings, workers = state.settings, state.workers
    allowed = (
        settings.drafter_enabled
        and not settings.serial_drafter
        and state.step % settings.training_interval_steps == 0
        and not state.lost
        and workers.counted(WorkerState.GENERATING)
        and workers.counted(WorkerState.RELEASED) >= settings.min_workers_for_training
    )
    assert state.lease is not None or not allowed


def leads_on(explored: Explored) -> None:
    """From every world the run can end, without another fault, and every lease with it."""
    ending = explored.lead_to(lambda state: state.phase is Phase.FINISHED)
    stuck = [world for i, world in enumerate(explored.worlds) if i not in ending]
    assert not stuck, stuck[0]
    assert all(
        world.state.lease is None
        for world in explored.worlds
        if world.state.phase is Phase.FINISHED
    )


def test_no_order_of_events_and_faults_breaks_a_rule_or_stops_a_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    states = 0
    for name, (settings, faults) in SCHEDULES.items():
        explored = explore(settings, faults, check)
        leads_on(explored)
        states += len(explored.worlds)
        with capsys.disabled():
            print(f"\n{name}: {len(explored.worlds):,} states, {explored.moves:,} moves", end="")
    assert states >= FEWEST_STATES


def test_the_explorer_finds_a_drafter_that_is_not_told_of_released_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafter, "lease_released", Decision)
    with pytest.raises(AssertionError, match="Detached"):
        explore(THREE, 0, check)


def test_the_explorer_finds_a_share_that_is_taken_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = EVENTS[events.ShareDone]._replace(late=call)
    monkeypatch.setitem(EVENTS, events.ShareDone, late)
    with pytest.raises(MachineError, match="ShareDone"):
        explore(THREE, 0, check)
