"""The machine, event by event, against a worker table and a phase diagram written down here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from itertools import product

import pytest

from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.commands import Decision
from paceline.services.coordinator.machine.drafter import (
    FROZEN,
    FROZEN_INTERVAL_STEPS,
    captured,
)
from paceline.services.coordinator.machine.settings import RunSettings
from paceline.services.coordinator.machine.slots import (
    WORKER_TRANSITIONS,
    Cause,
    Holder,
    Slot,
    WorkerState,
    slot_row,
    worker_row,
)
from paceline.services.coordinator.machine.state import (
    Evaluation,
    LearnerTrack,
    MachineError,
    Phase,
    Portion,
    RolloutTrack,
    Service,
    State,
)
from paceline.services.coordinator.machine.step import EVENTS, PHASES, step
from paceline.trajectory import VersionSet

WORKER_TABLE = {
    ("idle", "StepBegan"): "generating",
    ("generating", "ShareDone"): "released",
    ("released", "LeaseGranted"): "training",
    ("training", "DrafterDone"): "completed",
    ("training", "Preempted"): "completed",
    ("completed", "StepBegan"): "generating",
    ("released", "StepBegan"): "generating",
    ("generating", "Suspended"): "suspended",
    ("suspended", "Resumed"): "generating",
    ("completed", "PolicyStepped"): "released",
    ("completed", "Committed"): "released",
    ("suspended", "ShareDone"): "released",
}
WHOLE = (Portion(0),)
"""A batch of all groups of step 0."""
TWO = RunSettings(workers=2, total_steps=2, training_interval_steps=1)


def run(state: State, *happened: events.Event) -> tuple[State, tuple[commands.Command, ...]]:
    """The state after the events, and the commands of the last one."""
    issued: tuple[commands.Command, ...] = ()
    for event in happened:
        state, issued = step(state, event)
    return state, issued


def begun(settings: RunSettings = TWO) -> State:
    """Step 0 generates."""
    return run(State(), events.RunStarted(0, settings, VersionSet()), events.StepBegan(1, 0))[0]


def training(settings: RunSettings = TWO) -> State:
    """Worker 0 has released its slot to the drafter, worker 1 generates."""
    state = begun(settings)
    return step(state, events.ShareDone(2, state.rollouts.epoch, 0))[0]


def in_policy(settings: RunSettings = TWO) -> State:
    """The policy trains."""
    state = training(settings)
    state = step(state, events.TasksFinished(3, state.rollouts.epoch))[0]
    return step(state, events.Preempted(4, state.lease_epoch))[0]


def in_commit() -> State:
    """p1 is prepared and being committed."""
    state = in_policy()
    return run(
        state,
        events.PolicyStepped(5, state.learner.epoch, 1),
        events.PolicyPrepared(6, state.learner.epoch, 1),
    )[0]


@pytest.mark.parametrize(("before", "cause"), list(product(WorkerState, Cause)))
def test_workers_move_as_drawn_and_in_no_other_way(before: WorkerState, cause: Cause) -> None:
    state = State(workers=worker_row([before]))
    expected = WORKER_TABLE.get((before.value, cause.value))
    if expected is None:
        with pytest.raises(MachineError, match=cause.value):
            state.move_workers([0], cause)
    else:
        assert tuple(state.move_workers([0], cause).workers) == (WorkerState(expected),)
    assert len(WORKER_TRANSITIONS) == len(WORKER_TABLE)


DIAGRAM = {
    "new": {"running"},
    "running": {"paused", "evaluate", "closing"},
    "paused": {"running"},
    "evaluate": {"running"},
    "closing": {"finished", "running"},
    "finished": {"running"},
    "failed": set(),
    "ready": {"rollout"},
    "rollout": {"ready", "suspended"},
    "suspended": {"rollout", "ready"},
    "idle": {"preempt"},
    "preempt": {"policy"},
    "policy": {"drafter", "preempt"},
    "drafter": {"commit"},
    "commit": {"idle", "preempt"},
}


def test_phases_follow_each_other_as_drawn_and_every_event_has_a_row() -> None:
    assert {phase.value: {then.value for then in row.then} for phase, row in PHASES.items()} == (
        DIAGRAM
    )
    declared = {
        each for each in vars(events).values() if isinstance(each, type) and is_dataclass(each)
    }
    bases = {events.Event, events.CallAnswer}
    assert set(EVENTS) == {each for each in declared if issubclass(each, events.Event)} - bases


def test_a_handler_cannot_enter_a_phase_that_does_not_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leap = EVENTS[events.TasksFinished]._replace(
        handle=lambda state, event: Decision(state, enters=Phase.DRAFTER)
    )
    monkeypatch.setitem(EVENTS, events.TasksFinished, leap)
    with pytest.raises(MachineError, match=r"entering drafter .* rollout"):
        step(begun(), events.TasksFinished(2, 1))


def test_a_held_slot_is_never_leased_again() -> None:
    state = State(slots=slot_row([Slot(), Slot()])).lease_slots([1], Holder.DRAFTER)
    with pytest.raises(MachineError, match="held by drafter"):
        state.lease_slots([0, 1], Holder.POLICY)


def test_fencing_gives_a_freed_slot_a_new_epoch_and_confirmation_keeps_the_old() -> None:
    state = State(slots=slot_row([Slot()])).lease_slots([0], Holder.DRAFTER)
    assert tuple(state.free_slots([0]).slots) == (Slot(Holder.NONE, 1),)
    assert tuple(state.free_slots([0], fence=True).slots) == (Slot(Holder.NONE, 2),)


def test_a_step_begins_with_all_slots_leased_to_the_engine() -> None:
    state, issued = run(State(), events.RunStarted(0, TWO, VersionSet()))
    assert issued == (commands.BeginStep(0),)
    state, issued = step(state, events.StepBegan(1, 0))
    assert issued == (commands.RunTasks(0, 1, state.versions, places=1),)
    assert tuple(state.slots) == (Slot(Holder.ENGINE, 1),) * 2
    assert tuple(state.workers) == (WorkerState.GENERATING,) * 2


def test_the_first_released_slot_goes_to_the_drafter_while_the_other_worker_generates() -> None:
    state = begun()
    state, issued = step(state, events.ShareDone(2, 1, 1))
    assert issued == (commands.ActivateDrafter(0, 2, (1,), VersionSet()),)
    assert tuple(state.slots) == (Slot(Holder.ENGINE, 1), Slot(Holder.DRAFTER, 2))
    assert tuple(state.workers) == (WorkerState.GENERATING, WorkerState.TRAINING)


SERIAL = replace(TWO, serial_drafter=True)


def serial_drafting() -> State:
    """p1 is prepared, and the drafter trains before it is committed."""
    state = begun(SERIAL)
    state = run(
        state,
        events.ShareDone(2, state.rollouts.epoch, 0),
        events.TasksFinished(3, state.rollouts.epoch),
    )[0]
    return step(state, events.PolicyPrepared(5, state.learner.epoch, 1))[0]


def test_in_the_serial_schedule_the_drafter_trains_between_policy_step_and_commit() -> None:
    state = begun(SERIAL)
    state, issued = step(state, events.ShareDone(2, state.rollouts.epoch, 0))
    assert issued == ()
    state, issued = step(state, events.TasksFinished(3, state.rollouts.epoch))
    assert [type(command) for command in issued] == [commands.TrainPolicy]
    state, issued = step(state, events.PolicyPrepared(5, state.learner.epoch, 1))
    assert issued == (commands.ActivateDrafter(0, state.lease_epoch, (0,), VersionSet()),)
    assert (state.learner.phase, state.slots[0].holder) == (Phase.DRAFTER, Holder.DRAFTER)
    state, issued = run(
        state,
        events.GatePromoted(6, state.lease_epoch, 4),
        events.Detached(7, state.lease_epoch, "x"),
    )
    assert issued == (commands.Commit(0, state.epoch, VersionSet(1, 1, 4)),)


@pytest.mark.parametrize(
    "event",
    [
        events.TrainerFailed(6, 3, Service.DRAFTER_TRAINER, "died"),
        events.ServiceLost(6, Service.DRAFTER_TRAINER, "away"),
        events.Deadline(6, 3, "preempt", 2.0),
    ],
)
def test_a_serial_drafter_that_is_lost_does_not_hold_the_policy_back(event: events.Event) -> None:
    state, issued = step(serial_drafting(), event)
    assert state.learner.phase is Phase.COMMIT
    assert [command.versions for command in issued if isinstance(command, commands.Commit)] == [
        VersionSet(1, 1, 0)
    ]


def test_a_resumed_run_ends_the_serial_drafters_lease_first() -> None:
    state, issued = step(serial_drafting(), events.Resumed(6, 2))
    assert issued == (commands.PreemptDrafter(0, state.lease_epoch),)
    assert step(state, events.Preempted(7, state.lease_epoch))[0].learner.phase is Phase.COMMIT


def test_the_last_released_slot_stays_free() -> None:
    state = begun(replace(TWO, workers=1))
    state, issued = step(state, events.ShareDone(2, 1, 0))
    assert (issued, tuple(state.slots)) == ((), (Slot(Holder.NONE, 1),))


def test_the_drafter_gets_no_slot_when_the_settings_forbid_it() -> None:
    settings = replace(TWO, drafter_enabled=False)
    assert step(begun(settings), events.ShareDone(2, 1, 0))[1] == ()


def test_the_drafter_gets_slots_of_the_workers_on_its_host_only() -> None:
    before = begun(replace(TWO, leasable_workers=1))
    state, issued = step(before, events.ShareDone(2, 1, 1))
    assert (issued, state.lease) == ((), None), "worker 1 is at another gateway"
    activates = commands.ActivateDrafter(0, 2, (0,), VersionSet())
    assert step(before, events.ShareDone(2, 1, 0))[1] == (activates,)


def test_the_drafter_trains_only_in_every_nth_step() -> None:
    state = begun(replace(TWO, training_interval_steps=2))
    odd, even = (replace(state, learner=LearnerTrack(step=number)) for number in (1, 2))
    assert step(odd, events.ShareDone(2, 1, 0))[1] == ()
    assert step(even, events.ShareDone(2, 1, 0))[1] != ()


def test_a_frozen_drafter_rests_for_some_steps_and_no_row_is_captured_for_it() -> None:
    state = training()
    state, _ = step(state, events.Detached(3, state.lease_epoch, FROZEN))
    looks = []
    for number in range(FROZEN_INTERVAL_STEPS + 2):
        begins = begun(state.settings)
        begins = replace(
            begins,
            learner=LearnerTrack(step=number),
            drafter_rests_until=state.drafter_rests_until,
        )
        leased = step(begins, events.ShareDone(2, 1, 0))[1] != ()
        assert captured(state, number) == leased
        looks.append(leased)
    assert looks == [False] * FROZEN_INTERVAL_STEPS + [True, True]


def test_the_tasks_of_a_step_say_whether_rows_are_captured() -> None:
    started, _ = step(State(), events.RunStarted(0, TWO, VersionSet()))
    _, issued = step(started, events.StepBegan(1, 0))
    assert [one.capture for one in issued if isinstance(one, commands.RunTasks)] == [True]
    _, issued = step(replace(started, drafter_rests_until=1), events.StepBegan(1, 0))
    assert [one.capture for one in issued if isinstance(one, commands.RunTasks)] == [False]


def test_finished_tasks_preempt_the_drafter_before_the_policy_gets_its_slots() -> None:
    state = training()
    state, issued = step(state, events.TasksFinished(3, 1))
    assert issued == (commands.PreemptDrafter(0, 2),)
    assert state.learner.phase is Phase.PREEMPT
    state, issued = step(state, events.Preempted(4, 2))
    assert issued == (commands.TrainPolicy(0, 3, (0, 1), 0, WHOLE),)
    assert tuple(state.workers) == (WorkerState.COMPLETED, WorkerState.RELEASED)
    assert tuple(state.slots) == (Slot(Holder.POLICY, 3),) * 2


@pytest.mark.parametrize("reason", ["epochs", "no_data", "max_steps"])
def test_a_drafter_that_is_done_frees_its_slot_while_others_generate(reason: str) -> None:
    state, issued = step(training(), events.Detached(3, 2, reason))
    assert (state.workers[0], state.slots[0], issued) == (
        WorkerState.COMPLETED,
        Slot(Holder.NONE, 2),
        (),
    )


def two_released() -> State:
    """Worker 0's slot is the drafter's, worker 1 has released its own since, worker 2 generates."""
    state = begun(replace(TWO, workers=3))
    return run(state, events.ShareDone(2, 1, 0), events.ShareDone(3, 1, 1))[0]


def test_a_drafter_that_is_done_gets_the_slots_that_were_released_meanwhile() -> None:
    issued = step(two_released(), events.Detached(4, 2, "epochs"))[1]
    assert [one.slots for one in issued if isinstance(one, commands.ActivateDrafter)] == [(1,)]
    failed = events.TrainerFailed(4, 2, Service.DRAFTER_TRAINER, "died")
    assert step(two_released(), failed)[1] == (), "not before the next share"


THREE = replace(TWO, workers=3, max_drafter_slots=2)
TRAINS = events.DrafterActivated(3, 2)


def test_a_slot_that_is_released_later_joins_the_lease_under_its_epoch() -> None:
    one = run(begun(THREE), events.ShareDone(2, 1, 0))[0]
    state, issued = run(one, TRAINS, events.ShareDone(4, 1, 1))
    assert issued == (commands.JoinDrafter(0, 2, (0, 1), (1,)),)
    assert tuple(state.slots)[:2] == (Slot(Holder.DRAFTER, 2),) * 2
    assert step(one, events.ShareDone(3, 1, 1))[1] == (), "not while its first slot is on its way"
    waited = run(one, events.ShareDone(3, 1, 1), TRAINS)
    assert waited[1] == issued
    state, issued = step(state, events.Preempted(5, 2))
    assert tuple(state.slots)[:2] == (Slot(Holder.NONE, 2),) * 2, "one lease ends at once"


@pytest.mark.parametrize(
    "event", [events.JoinFailed(5, 2, "it stops"), events.Deadline(5, 2, "join", 30.0)]
)
def test_a_drafter_that_does_not_take_its_new_slot_is_preempted(event: events.Event) -> None:
    joins = run(begun(THREE), events.ShareDone(2, 1, 0), TRAINS, events.ShareDone(4, 1, 1))[0]
    assert step(joins, event)[1] == (commands.PreemptDrafter(0, 2),)
    joined = step(joins, events.DrafterJoined(5, 2, 2))[0]
    assert step(joined, events.DrafterJoined(6, 2, 2)) == (joined, ()), "a duplicate"
    assert step(joined, TRAINS) == (joined, ()), "a late one"


@pytest.mark.parametrize("event", [events.TasksFinished(5, 1), events.JoinFailed(5, 2, "it stops")])
def test_nothing_joins_a_lease_that_is_being_preempted(event: events.Event) -> None:
    wider = replace(THREE, workers=4, max_drafter_slots=3)
    state = run(begun(wider), events.ShareDone(2, 1, 0), TRAINS, events.ShareDone(4, 1, 1))[0]
    state = run(state, event, events.DrafterJoined(6, 2, 2))[0]
    assert state.lease is not None
    assert (state.lease.preempting, state.lease.slots) == (True, (0, 1))
    if Phase.ROLLOUT in state.phases:
        assert step(state, events.ShareDone(7, 1, 2))[1] == ()


def test_a_drafter_trainer_that_is_back_gets_the_slots_that_were_released_meanwhile() -> None:
    state = step(two_released(), events.ServiceLost(4, Service.DRAFTER_TRAINER, "away"))[0]
    issued = step(state, events.ServiceBack(5, Service.DRAFTER_TRAINER))[1]
    assert [one.slots for one in issued if isinstance(one, commands.ActivateDrafter)] == [(1,)]


def test_an_unanswered_preemption_frees_the_slot_under_a_new_epoch() -> None:
    state = step(training(), events.TasksFinished(3, 1))[0]
    state, issued = step(state, events.Deadline(5, 2, "preempt", 2.0))
    assert issued == (commands.TrainPolicy(0, 4, (0, 1), 0, WHOLE),)
    assert step(state, events.Preempted(6, 2)) == (state, (commands.Refuse("Preempted", 2, 2),))


def test_a_late_activation_is_preempted() -> None:
    state, issued = step(training(), events.Deadline(33, 2, "activation", 30.0))
    assert issued == (commands.PreemptDrafter(0, 2),)
    assert step(state, events.TasksFinished(34, 1))[1] == ()


def test_a_lost_drafter_rank_frees_the_slot_and_does_not_end_the_run() -> None:
    state, issued = step(
        training(), events.TrainerFailed(3, 2, Service.DRAFTER_TRAINER, "rank 0 died")
    )
    assert (state.rollouts.phase, state.lease, issued) == (Phase.ROLLOUT, None, ())
    assert state.slots[0] == Slot(Holder.NONE, 3)


def test_a_promoted_drafter_is_served_with_the_next_policy() -> None:
    state = training()
    state = run(
        state,
        events.DrafterActivated(2, 2),
        events.GatePromoted(3, 2, 7),
        events.TasksFinished(4, 1),
    )[0]
    state = step(state, events.Preempted(5, 2))[0]
    state = step(state, events.PolicyStepped(6, state.learner.epoch, 1))[0]
    state, issued = step(state, events.PolicyPrepared(7, state.learner.epoch, 1))
    assert issued == (commands.Commit(0, 4, VersionSet(1, 1, 7)),)
    state, issued = step(state, events.Committed(8, VersionSet(1, 1, 7)))
    assert issued == (commands.CloseStep(0), commands.BeginStep(1))
    assert (state.versions, state.previous_drafter, state.promoted) == (
        VersionSet(1, 1, 7),
        0,
        None,
    )


def test_a_promotion_overtaken_by_the_preemption_is_kept_for_the_next_commit() -> None:
    state = step(in_policy(), events.GatePromoted(5, 2, 7))[0]
    assert state.promoted == 7


@pytest.mark.parametrize("decision", ["kept", "refused", "frozen", "reopened", "rolled_back"])
def test_other_decisions_of_the_gate_are_records_that_change_nothing(decision: str) -> None:
    for state in (training(), in_policy()):
        assert step(state, events.GateDecided(5, 2, decision, 7)) == (state, ())


def test_a_newer_candidate_replaces_an_uncommitted_one() -> None:
    state, issued = run(training(), events.GatePromoted(3, 2, 7), events.GatePromoted(4, 2, 8))
    assert (state.promoted, issued) == (8, (commands.AbortDrafter(0, 2, 7),))


def test_a_candidate_that_is_being_committed_is_not_aborted_for_a_newer_one() -> None:
    state = run(in_policy(), events.GatePromoted(5, 2, 7), events.PolicyPrepared(6, 3, 1))[0]
    assert state.committing == VersionSet(1, 1, 7)
    state, issued = step(state, events.GatePromoted(7, 2, 8))
    assert (state.promoted, issued) == (8, ())
    state = step(state, events.Committed(8, VersionSet(1, 1, 7)))[0]
    assert (state.versions.drafter, state.promoted) == (7, 8), "the newer one waits for its commit"


def test_slots_are_free_while_the_policy_is_pushed() -> None:
    state = in_policy()
    state = step(state, events.PolicyStepped(5, state.learner.epoch, 1))[0]
    assert {slot.holder for slot in state.slots} == {Holder.NONE}


PUSHING = replace(TWO, train_during_push=True)


def test_a_drafter_that_has_trained_in_the_rollouts_trains_again_during_the_push() -> None:
    state = in_policy(PUSHING)
    state = step(state, events.PolicyStepped(5, state.learner.epoch, 1))[0]
    assert state.lease is not None
    assert tuple(state.workers) == (WorkerState.TRAINING, WorkerState.RELEASED)
    state, issued = step(state, events.PolicyPrepared(6, state.learner.epoch, 1))
    assert issued == (
        commands.Commit(0, state.epoch, VersionSet(1, 1, 0), leased=(0,)),
        commands.PreemptDrafter(0, state.lease_epoch),
    )


def test_a_drafter_on_all_slots_during_the_push_leaves_before_the_commit() -> None:
    state = in_policy(replace(PUSHING, max_drafter_slots=2))
    state = step(state, events.PolicyStepped(5, state.learner.epoch, 1))[0]
    state, issued = step(state, events.PolicyPrepared(6, state.learner.epoch, 1))
    assert issued == (commands.PreemptDrafter(0, state.lease_epoch),)
    state, issued = step(state, events.Preempted(7, state.lease_epoch))
    assert issued == (commands.Commit(0, state.epoch, VersionSet(1, 1, 0)),)


def test_acceptance_that_fell_brings_the_previous_drafter_back_under_a_new_seq() -> None:
    state = replace(begun(), versions=VersionSet(3, 0, 7), seq=3, previous_drafter=4)
    state = run(
        state, events.AcceptanceFell(2, 7), events.ShareDone(2, 1, 0), events.TasksFinished(3, 1)
    )[0]
    state = step(state, events.Preempted(4, state.lease_epoch))[0]
    state, issued = run(state, events.PolicyPrepared(6, state.learner.epoch, 1))
    assert issued == (commands.Commit(0, state.epoch, VersionSet(4, 0, 4)),)
    state, issued = step(state, events.Committed(7, VersionSet(4, 0, 4)))
    assert issued == (commands.Commit(0, state.epoch, VersionSet(5, 1, 4)),)
    state, issued = step(state, events.Committed(8, VersionSet(5, 1, 4)))
    assert (state.versions, state.previous_drafter) == (VersionSet(5, 1, 4), None)
    assert issued == (commands.CloseStep(0), commands.BeginStep(1))


def test_a_rollback_to_a_drafter_that_is_gone_is_given_up_and_the_policy_is_served() -> None:
    state = replace(
        in_policy(), versions=VersionSet(3, 0, 7), seq=3, previous_drafter=4, rollback=True
    )
    state = step(state, events.PolicyPrepared(6, state.learner.epoch, 1))[0]
    state, issued = step(state, events.CommitFailed(7, VersionSet(4, 0, 4), "d4 is not spooled"))
    assert issued == (commands.Commit(0, state.epoch, VersionSet(5, 1, 7)),)


def test_acceptance_of_a_drafter_that_no_longer_serves_is_refused() -> None:
    state = begun()
    assert step(state, events.AcceptanceFell(2, 7)) == (
        state,
        (commands.Refuse("AcceptanceFell", 7, 0),),
    )


def test_a_failed_commit_leaves_the_candidate_out_and_then_pushes_the_policy_again() -> None:
    state = in_policy()
    state = run(
        state, events.GatePromoted(5, 2, 7), events.PolicyPrepared(6, state.learner.epoch, 1)
    )[0]
    state, issued = step(state, events.CommitFailed(7, VersionSet(1, 1, 7), "d7 is not prepared"))
    assert issued == (commands.AbortDrafter(0, 2, 7), commands.Commit(0, 5, VersionSet(2, 1, 0)))
    state, issued = step(state, events.CommitFailed(8, VersionSet(2, 1, 0), "p1 is not prepared"))
    assert issued == (commands.TrainPolicy(0, 6, (0, 1), 0, WHOLE),)
    state = step(state, events.PolicyPrepared(9, 6, 1))[0]
    assert state.committing == VersionSet(3, 1, 0)


def test_a_commit_that_keeps_failing_ends_the_run_with_its_message() -> None:
    state = in_commit()
    for _ in range(3):
        assert state.committing is not None
        state, issued = step(state, events.CommitFailed(7, state.committing, "p1 is not prepared"))
        if state.learner.phase is Phase.POLICY:
            state = step(state, events.PolicyPrepared(8, state.learner.epoch, 1))[0]
    assert state.phase is Phase.FAILED
    assert issued[-1] == commands.FinishRun("commit: p1 is not prepared (attempt 3 of 3)")


def test_evaluations_are_made_at_both_ends_and_at_their_interval() -> None:
    settings = replace(
        TWO, workers=1, total_steps=3, accuracy_enabled=True, probe_enabled=True, probe_every=2
    )
    state, issued = step(State(), events.RunStarted(0, settings, VersionSet()))
    made: dict[int, list[Evaluation]] = {}
    while not isinstance(issued[-1], commands.FinishRun):
        match issued[-1]:
            case commands.Evaluate(finished, epoch, kind):
                assert {slot.holder for slot in state.slots} == {Holder.ENGINE}
                made.setdefault(finished, []).append(kind)
                state, issued = step(state, events.EvaluationDone(1, epoch, kind, 0.5))
            case commands.BeginStep(number):
                state, issued = step(state, events.StepBegan(1, number))
            case commands.RunTasks(_, epoch):
                state, issued = step(state, events.TasksFinished(1, epoch))
            case commands.TrainPolicy(_, epoch, _, version):
                state, issued = step(state, events.PolicyPrepared(1, epoch, version + 1))
            case commands.Commit(_, _, versions):
                state, issued = step(state, events.Committed(1, versions))
            case commands.SaveCheckpoints(_, epoch):
                state, issued = step(state, events.CheckpointsSaved(1, epoch))
    both = [Evaluation.ACCURACY, Evaluation.PROBE]
    assert made == {0: both, 2: [Evaluation.PROBE], 3: both}


def test_a_stopped_run_finishes_the_running_step() -> None:
    state = step(in_commit(), events.StopRequested(6))[0]
    assert state.committing is not None
    state, issued = step(state, events.Committed(7, state.committing))
    assert (state.phase, state.step) == (Phase.CLOSING, 1)
    assert isinstance(issued[-1], commands.SaveCheckpoints)


def test_a_lost_gateway_gets_its_tasks_again_after_the_drafter_left_the_slots() -> None:
    state, issued = step(training(), events.ServiceLost(3, Service.GATEWAY, "connection refused"))
    assert issued == (commands.AwaitService(Service.GATEWAY), commands.PreemptDrafter(0, 2))
    state, issued = step(state, events.ServiceBack(4, Service.GATEWAY))
    assert issued == ()
    state, issued = step(state, events.Preempted(5, 2))
    assert issued == (commands.RunTasks(0, state.epoch, state.versions, places=1),)
    assert tuple(state.workers) == (WorkerState.GENERATING,) * 2
    assert step(state, events.ShareDone(6, 1, 0)) == (
        state,
        (commands.Refuse("ShareDone", 1, state.epoch),),
    )


def evaluating() -> State:
    """The probe is being made before the first step."""
    return step(State(), events.RunStarted(0, replace(TWO, probe_enabled=True), VersionSet()))[0]


def closing() -> State:
    """All steps are done and the trainers save their checkpoints."""
    stopped = step(in_commit(), events.StopRequested(6))[0]
    return step(stopped, events.Committed(7, VersionSet(1, 1, 0)))[0]


def paused() -> State:
    """One step has ended, and an operator lets no other begin."""
    state = run(in_commit(), events.Paused(6), events.Committed(7, VersionSet(1, 1, 0)))[0]
    assert state.phase is Phase.PAUSED
    return state


SITUATIONS = {
    "evaluate": (evaluating, commands.Evaluate, {Service.GATEWAY, Service.POLICY_TRAINER}),
    "rollout": (begun, commands.RunTasks, {Service.GATEWAY, Service.POLICY_TRAINER}),
    "policy": (in_policy, commands.TrainPolicy, {Service.GATEWAY, Service.POLICY_TRAINER}),
    "commit": (in_commit, commands.Commit, {Service.GATEWAY}),
    "closing": (closing, commands.SaveCheckpoints, {Service.POLICY_TRAINER}),
    "paused": (paused, commands.ResumeWorkers, {Service.GATEWAY}),
}


@pytest.mark.parametrize("service", Service)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_phase_makes_its_call_again_when_the_called_service_is_back(
    situation: str, service: Service
) -> None:
    state_of, call, called = SITUATIONS[situation]
    before = state_of()
    assert before.doing == situation
    lost, issued = step(before, events.ServiceLost(8, service, "connection refused"))
    assert issued == (commands.AwaitService(service),)
    state, issued = step(lost, events.ServiceBack(9, service))
    assert state.doing == before.doing
    if service in called:
        assert [type(command) for command in issued] == [call]
        assert issued[0].epoch > before.epoch
    else:
        assert issued == ()


def test_a_run_whose_trainer_was_away_while_closing_finishes() -> None:
    state = step(closing(), events.ServiceLost(8, Service.POLICY_TRAINER, "away"))[0]
    state = step(state, events.ServiceBack(9, Service.POLICY_TRAINER))[0]
    state, issued = step(state, events.CheckpointsSaved(10, state.phase_epoch))
    assert (state.phase, issued) == (Phase.FINISHED, (commands.FinishRun(""),))


def test_a_lost_drafter_trainer_frees_the_slot_and_the_rollout_goes_on() -> None:
    state, issued = step(
        training(), events.ServiceLost(3, Service.DRAFTER_TRAINER, "connection refused")
    )
    assert issued == (commands.AwaitService(Service.DRAFTER_TRAINER),)
    assert (state.rollouts.phase, state.lease) == (Phase.ROLLOUT, None)


@pytest.mark.parametrize("state_of", [begun, training, in_policy, in_commit, closing])
def test_nothing_that_befalls_the_drafter_trainer_ends_the_run(
    state_of: Callable[[], State],
) -> None:
    before = state_of()
    for event in (
        events.CallFailed(8, Service.DRAFTER_TRAINER, "recovery", "gone"),
        events.ServiceLost(9, Service.DRAFTER_TRAINER, "gone"),
    ):
        after = step(before, event)[0]
        assert (after.phases, after.lease) == (before.phases, None)


def test_a_lost_worker_gets_its_share_again_under_a_new_epoch_and_not_for_ever() -> None:
    state = begun()
    state, issued = step(state, events.WorkerLost(2, 1, 1))
    assert issued == (commands.RunTasks(0, state.epoch, state.versions, places=1),)
    for _ in range(2):
        state, issued = step(state, events.WorkerLost(3, state.rollouts.epoch, 1))
    back = commands.HandBack(0, state.epoch, 0, policy=False)
    assert issued == (
        back,
        commands.FinishRun("worker 1 of the gateway died (attempt 3 of 3)"),
    )


@pytest.mark.parametrize("what", ["rollout"])
def test_a_step_that_takes_too_long_fails_and_a_resumed_run_takes_it_up(what: str) -> None:
    state, issued = step(training(), events.Deadline(600, 1, what, 600.0))
    assert issued[-1] == commands.FinishRun("rollout of step 0 took longer than 600 s")
    state, issued = step(state, events.Resumed(700, 2))
    assert issued == (commands.PreemptDrafter(0, 2),)
    state, issued = step(state, events.Deadline(702, 2, "preempt", 2.0))
    assert issued == (commands.RunTasks(0, state.epoch, state.versions, places=1),)


def test_a_run_that_fails_has_its_slots_given_back_under_a_new_epoch() -> None:
    state, issued = step(training(), events.Deadline(600, 1, "rollout", 600.0))
    assert issued[0] == commands.HandBack(0, 3, 2, policy=False), "the drafter leaves first"
    assert state.epoch == 3
    state, issued = step(state, events.Resumed(601, 2))
    assert issued == (commands.PreemptDrafter(0, 2),)
    assert step(state, events.Preempted(602, 2))[1][0].epoch > 3  # type: ignore[attr-defined]
    failed = events.CallFailed(9, Service.POLICY_TRAINER, "policy", "broken")
    state, issued = step(in_policy(), failed)
    assert issued[0] == commands.HandBack(0, state.epoch, 0, policy=True)


def test_resuming_issues_the_interrupted_call_again() -> None:
    assert step(in_policy(), events.Resumed(9, 2))[1] == (
        commands.TrainPolicy(0, 5, (0, 1), 0, WHOLE),
    )
    assert step(in_commit(), events.Resumed(9, 2))[1] == (
        commands.Commit(0, 5, VersionSet(1, 1, 0)),
    )
    ready = step(State(), events.RunStarted(0, TWO, VersionSet()))[0]
    assert step(ready, events.Resumed(9, 2))[1] == (commands.BeginStep(0),)


def test_a_finished_run_says_so_and_goes_on_when_more_steps_are_wanted() -> None:
    finished = replace(
        begun(),
        phase=Phase.FINISHED,
        rollouts=RolloutTrack(step=2),
        learner=LearnerTrack(step=2),
        slots=slot_row([Slot()] * 2),
    )
    assert step(finished, events.Resumed(9, 2))[1] == (commands.FinishRun(""),)
    assert step(finished, events.Resumed(9, 3))[1] == (commands.BeginStep(2),)


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (State(), events.Resumed(1, 2)),
        (State(), events.StepBegan(1, 0)),
        (begun(), events.StepBegan(1, 1)),
        (begun(), events.TasksFinished(1, 99)),
        (begun(), events.ShareDone(1, 1, 5)),
        (begun(), events.Preempted(1, 9)),
        (begun(), events.Committed(1, VersionSet(5, 1, 0))),
        (in_policy(), events.TasksFinished(1, 3)),
        (in_policy(), events.PolicyPrepared(1, 3, 5)),
        (in_commit(), events.PolicyPrepared(1, 4, 1)),
        (in_commit(), events.EvaluationDone(1, 4, Evaluation.PROBE, 1.0)),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, State) else value.doing,
)
def test_an_illegal_event_names_itself_and_the_state(state: State, event: events.Event) -> None:
    with pytest.raises(MachineError) as caught:
        step(state, event)
    assert type(event).__name__ in caught.value.event
    assert state.doing in caught.value.state


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (in_policy(), events.ShareDone(1, 1, 1)),
        (in_policy(), events.TasksFinished(1, 1)),
        (in_policy(), events.Detached(1, 2, "preempted")),
        (in_commit(), events.PolicyStepped(1, 3, 1)),
        (in_commit(), events.Committed(1, VersionSet(0, 0, 0))),
        (in_commit(), events.TrainerFailed(1, 3, Service.POLICY_TRAINER, "late")),
        (begun(), events.EvaluationDone(1, 0, Evaluation.PROBE, 1.0)),
        (begun(), events.RunStarted(1, TWO, VersionSet())),
        (begun(), events.StepBegan(1, 0)),
        (training(), events.ShareDone(1, 1, 0)),
        (training(), events.Deadline(1, 0, "evaluate", 9.0)),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, State) else value.doing,
)
def test_a_late_event_changes_nothing(state: State, event: events.Event) -> None:
    after, issued = step(state, event)
    assert after == state
    assert isinstance(issued[0], commands.Refuse)
