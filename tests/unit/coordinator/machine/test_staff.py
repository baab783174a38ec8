"""What an operator's words about workers do, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.choice import objection
from paceline.services.coordinator.machine.commands import Command
from paceline.services.coordinator.machine.settings import Placement, RunSettings, Schedule
from paceline.services.coordinator.machine.slots import Holder, WorkerState
from paceline.services.coordinator.machine.state import Phase, Service, State
from paceline.services.coordinator.machine.step import step
from paceline.trajectory import VersionSet

THREE = RunSettings(workers=3, vacant=0b100, elastic=True, total_steps=3, training_interval_steps=1)
"""Two workers, and a place for a third."""
ASYNC = replace(
    THREE, schedule=Schedule.FULLY_ASYNC, max_policy_lag=1, drafter_enabled=False, total_steps=9
)
ADD = events.WorkersRequested(2, (2,))
BOTH = 0b11


def run(state: State, *happened: events.Event) -> tuple[State, tuple[Command, ...]]:
    """The state after the events, and the commands of the last one."""
    issued: tuple[Command, ...] = ()
    for event in happened:
        state, issued = step(state, event)
    return state, issued


def begun(settings: RunSettings = THREE) -> State:
    """Step 0 generates."""
    return run(State(), events.RunStarted(0, settings, VersionSet()), events.StepBegan(1, 0))[0]


def drain(*workers: int, drain_s: float = 5.0) -> events.DrainRequested:
    return events.DrainRequested(3, workers, drain_s)


def calls(issued: tuple[Command, ...], kind: type[Command]) -> list[Command]:
    return [command for command in issued if isinstance(command, kind)]


def joined(state: State) -> State:
    state, issued = step(state, ADD)
    (call,) = calls(issued, commands.AddWorkers)
    assert isinstance(call, commands.AddWorkers)
    return step(state, events.WorkersJoined(4, call.epoch, call.workers))[0]


def through_the_step(state: State) -> tuple[State, tuple[Command, ...]]:
    """The step ends and the next one's tasks are called."""
    state = step(state, events.TasksFinished(5, state.rollouts.epoch))[0]
    if state.lease is not None:
        state = step(state, events.Preempted(5, state.lease.epoch))[0]
    state = step(state, events.PolicyPrepared(6, state.learner.epoch, state.step + 1))[0]
    assert state.committing is not None
    state = step(state, events.Committed(7, state.committing))[0]
    return step(state, events.StepBegan(8, state.rollouts.step))


def test_places_without_a_worker_get_no_tasks_and_no_lease() -> None:
    state = begun()
    assert tuple(state.workers)[2] is WorkerState.ABSENT
    assert [slot.holder for slot in state.slots] == [Holder.ENGINE, Holder.ENGINE, Holder.NONE]
    assert state.rollouts.running[0].owed == BOTH
    state, issued = run(state, events.ShareDone(2, state.rollouts.epoch, 0))
    assert [one.slots for one in issued if isinstance(one, commands.ActivateDrafter)] == [(0,)]


def test_an_added_worker_is_idle_until_the_next_tasks_and_has_a_share_of_them() -> None:
    state, issued = step(begun(), ADD)
    assert issued == (commands.AddWorkers(0, state.epoch, (2,)),)
    assert step(state, ADD) == (state, ())
    state, issued = step(state, events.WorkersJoined(4, state.epoch, (2,)))
    assert (issued, state.workers[2], state.slots[2].holder) == ((), WorkerState.IDLE, Holder.NONE)
    assert state.rollouts.running[0].owed == BOTH
    state, issued = through_the_step(state)
    assert state.rollouts.running[0].owed == 0b111
    assert [one.workers for one in issued if isinstance(one, commands.RunTasks)] == [0]
    assert state.slots.counted(Holder.ENGINE) == 3


def test_tasks_are_called_again_without_a_worker_that_is_to_leave_and_it_keeps_its_slot_till_then() -> (
    None
):
    state = begun()
    first = state.rollouts.epoch
    state, issued = step(state, drain(1, drain_s=7.0))
    (leaves,), (call,) = calls(issued, commands.DrainWorkers), calls(issued, commands.RunTasks)
    assert isinstance(leaves, commands.DrainWorkers)
    assert (leaves.workers, leaves.drain_s) == ((1,), 7.0)
    assert isinstance(call, commands.RunTasks)
    assert (call.step, call.workers, call.epoch > first) == (0, 0b1, True)
    assert (state.workers[1], state.slots[1].holder) == (WorkerState.LEAVING, Holder.ENGINE)
    assert state.rollouts.attempts == 0
    refused = commands.Refuse("ShareDone", first, call.epoch)
    assert step(state, events.ShareDone(4, first, 1)) == (state, (refused,))
    state, _ = step(state, events.WorkersLeft(5, leaves.epoch, (1,)))
    assert (state.workers[1], state.slots[1].holder) == (WorkerState.ABSENT, Holder.NONE)
    assert state.rollouts.running[0].owed == 0b1
    state, issued = through_the_step(state)
    assert [one.workers for one in issued if isinstance(one, commands.RunTasks)] == [0b1]


def test_a_worker_without_a_share_leaves_and_nothing_is_called_again() -> None:
    state = begun(replace(THREE, drafter_enabled=False))
    state, _ = step(state, events.ShareDone(2, state.rollouts.epoch, 0))
    state, issued = step(state, drain(0))
    assert [type(one) for one in issued] == [commands.DrainWorkers]


def test_the_drafter_gives_the_slots_of_a_leaving_worker_back_first() -> None:
    state = begun()
    state, _ = step(state, events.ShareDone(2, state.rollouts.epoch, 0))
    assert state.workers[0] is WorkerState.TRAINING
    state, issued = step(state, drain(0))
    assert [type(one) for one in issued] == [commands.PreemptDrafter]
    state, issued = step(state, events.Preempted(4, state.lease_epoch))
    assert [type(one) for one in issued] == [commands.DrainWorkers]
    assert (state.lease, state.workers[0]) == (None, WorkerState.LEAVING)
    assert state.slots[0].holder is Holder.NONE


def test_no_worker_starts_on_slots_that_a_colocated_policy_trains_on() -> None:
    state = begun(replace(THREE, drafter_enabled=False))
    state = step(state, events.TasksFinished(3, state.rollouts.epoch))[0]
    assert state.slots.counted(Holder.POLICY) == 3
    state, issued = step(state, ADD)
    assert issued == ()
    state, issued = step(state, events.PolicyStepped(4, state.learner.epoch, 1))
    assert [type(one) for one in issued] == [commands.AddWorkers]


def test_a_worker_may_leave_while_a_colocated_policy_trains_on_its_slot() -> None:
    state = begun(replace(THREE, drafter_enabled=False))
    state = step(state, events.TasksFinished(3, state.rollouts.epoch))[0]
    state, issued = step(state, drain(1))
    assert [type(one) for one in issued] == [commands.DrainWorkers]
    state, _ = step(state, events.WorkersLeft(5, state.leaving.epoch, (1,)))
    assert state.slots.counted(Holder.POLICY) == 3


def test_in_a_pause_the_engine_has_the_slots_of_those_who_are_there() -> None:
    state, _ = step(begun(replace(THREE, drafter_enabled=False)), events.Paused(2))
    state = step(state, events.TasksFinished(5, state.rollouts.epoch))[0]
    state = step(state, events.PolicyPrepared(6, state.learner.epoch, 1))[0]
    assert state.committing is not None
    state = step(state, events.Committed(7, state.committing))[0]
    assert (state.phase, state.slots.counted(Holder.ENGINE)) == (Phase.PAUSED, 2)
    state = joined(state)
    assert state.slots.counted(Holder.ENGINE) == 3
    state, _ = step(state, drain(0))
    state, _ = step(state, events.WorkersLeft(9, state.leaving.epoch, (0,)))
    assert [slot.holder for slot in state.slots] == [Holder.NONE, Holder.ENGINE, Holder.ENGINE]


def test_what_was_asked_of_a_gateway_that_is_lost_is_asked_again() -> None:
    state, _ = run(begun(), ADD, drain(0))
    coming, going = state.joining.epoch, state.leaving.epoch
    state, _ = step(state, events.ServiceLost(4, Service.GATEWAY, "gone"))
    state, issued = step(state, events.ServiceBack(5, Service.GATEWAY))
    again = [*calls(issued, commands.DrainWorkers), *calls(issued, commands.AddWorkers)]
    assert len(again) == 2
    for late in (events.WorkersJoined(6, coming, (2,)), events.WorkersLeft(6, going, (0,))):
        assert step(state, late)[0] == state
    state, _ = run(
        state,
        events.WorkersJoined(7, state.joining.epoch, (2,)),
        events.WorkersLeft(7, state.leaving.epoch, (0,)),
    )
    assert state.workers[0] is WorkerState.ABSENT
    assert (state.joining.workers, state.leaving.workers) == (0, 0)


def test_a_place_whose_worker_does_not_start_stays_vacant_and_may_be_asked_for_again() -> None:
    state, _ = step(begun(), ADD)
    state, _ = step(state, events.JoinRefused(3, state.joining.epoch, (2,), "no memory"))
    assert state.workers[2] is WorkerState.ABSENT
    assert [type(one) for one in step(state, ADD)[1]] == [commands.AddWorkers]


def test_a_drain_that_never_ends_fails_the_run_which_goes_on_with_it_when_resumed() -> None:
    state, _ = step(begun(), drain(0))
    state, _ = step(state, events.Deadline(4, state.leaving.epoch, "drain", 900.0))
    assert state.phase is Phase.FAILED
    _, issued = step(state, events.Resumed(5, 3))
    assert calls(issued, commands.DrainWorkers)


def test_suspended_rollouts_go_on_without_a_worker_that_leaves_meanwhile() -> None:
    state = begun(ASYNC)
    state = step(state, events.StepBegan(2, 1))[0]
    state = step(state, events.TasksFinished(3, state.rollouts.running[0].epoch))[0]
    assert Phase.SUSPENDED in state.phases
    state, issued = step(state, drain(1))
    assert [type(one) for one in issued] == [commands.DrainWorkers]
    state = step(state, events.PolicyPrepared(6, state.learner.epoch, 1))[0]
    assert state.committing is not None
    state, issued = step(state, events.Committed(7, state.committing))
    assert {one.workers for one in issued if isinstance(one, commands.RunTasks)} == {0b1}


@pytest.mark.parametrize(
    ("settings", "event", "seen", "allowed"),
    [
        (THREE, events.WorkersRequested(2, (1,)), "worker 1", "2"),
        (replace(THREE, vacant=0), ADD, "worker 2", "none"),
        (replace(THREE, elastic=False), ADD, "gateway.replicas above 1", "gateway.replicas=1"),
        (replace(THREE, total_steps=1), ADD, "1 of 1 steps have begun", "steps to begin"),
        (THREE, drain(2), "worker 2", "0, 1"),
        (THREE, drain(7), "worker 7", "0, 1"),
        (THREE, drain(0, 1), "drain 0, 1", "all but one of 0, 1"),
        (replace(THREE, elastic=False), drain(0), "gateway.replicas above 1", "replicas=1"),
    ],
)
def test_what_cannot_be_is_refused_with_what_may_be(
    settings: RunSettings,
    event: events.WorkersRequested | events.DrainRequested,
    seen: str,
    allowed: str,
) -> None:
    state = begun(settings)
    against = objection(state, event)
    assert against is not None
    assert str(against.seen) == seen
    assert allowed in against.allowed
    after, issued = step(state, event)
    assert after == state
    assert [type(one) for one in issued] == [commands.Refuse]


def test_the_last_one_that_stays_is_kept_also_while_another_leaves() -> None:
    state, _ = step(begun(), drain(0))
    assert objection(state, drain(1)) is not None
    assert objection(joined(state), drain(1)) is None
    assert objection(state, drain(0)) is None  # asked twice is asked once


def test_a_policy_of_its_own_slots_is_no_matter_to_workers_that_join() -> None:
    apart = replace(
        THREE, placement=Placement.DISAGGREGATED, learner_slots=1, drafter_enabled=False
    )
    state = step(begun(apart), events.TasksFinished(3, begun(apart).rollouts.epoch))[0]
    assert state.slots[3].holder is Holder.POLICY
    assert [type(one) for one in step(state, ADD)[1]] == [commands.AddWorkers]
