"""The coordinator's decisions: `step(state, event) -> (state, commands)`, pure. Owns the order of a
run and the leases.

Standard library only, no clock, no randomness: the same events give the same state and the same
commands, so a journal replays. A late event of an old lease, set or call changes nothing and is
answered by Refuse; an event that cannot happen raises MachineError.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from coordinator.machine.commands import (
    AbortDrafter,
    AwaitService,
    CloseStep,
    Command,
    FinishRun,
    Refuse,
)
from coordinator.machine.events import (
    AcceptanceFell,
    CallFailed,
    CheckpointsSaved,
    CommitFailed,
    Committed,
    Deadline,
    Detached,
    DrafterActivated,
    EvaluationDone,
    Event,
    GateDecided,
    GatePromoted,
    PolicyPrepared,
    PolicyStepped,
    Preempted,
    RankLost,
    Resumed,
    RunStarted,
    ServiceBack,
    ServiceLost,
    ShareDone,
    StepBegan,
    StopRequested,
    TasksFinished,
    WorkerLost,
)
from coordinator.machine.state import (
    Cause,
    Holder,
    MachineError,
    Phase,
    Service,
    Slot,
    State,
    WorkerState,
    free_slots,
    held_by,
    move_workers,
    worker_slots,
)
from coordinator.machine.transitions import (
    Outcome,
    attempted,
    commit,
    commit_prepared,
    evaluations_due,
    fail,
    fail_if_exhausted,
    generate,
    is_rollback,
    lease_drafter,
    next_call,
    preempt,
    run_tasks_again,
    train_drafter,
    train_policy,
)


def step(state: State, event: Event) -> Outcome:
    """The state after `event` and what is to be done.

    Raises MachineError when the event is illegal here.
    """
    if state.phase in (Phase.FINISHED, Phase.FAILED) and not isinstance(event, Resumed):
        return state, (Refuse(type(event).__name__, state.step, state.step),)
    match event:
        case RunStarted():
            return _run_started(state, event)
        case Resumed():
            return _resumed(state, event)
        case StepBegan():
            return _step_began(state, event)
        case ShareDone() | TasksFinished() | WorkerLost():
            return _rollout(state, event)
        case GateDecided():
            return state, ()  # a record, however late
        case DrafterActivated() | GatePromoted() | Preempted() | Detached():
            return _drafter(state, event)
        case RankLost():
            return _rank_lost(state, event)
        case Deadline():
            return _deadline(state, event)
        case PolicyStepped() | PolicyPrepared():
            return _policy(state, event)
        case Committed() | CommitFailed():
            return _commit_answered(state, event)
        case AcceptanceFell():
            return _acceptance_fell(state, event)
        case EvaluationDone() | CheckpointsSaved():
            return _boundary_call_done(state, event)
        case StopRequested():
            return _stop_requested(state), ()
        case ServiceLost():
            return _service_lost(state, event)
        case ServiceBack():
            return _service_back(state, event)
        case CallFailed():
            return fail(state, f"{event.service}: {event.call}: {event.message}")
        case _:
            assert_never(event)


# --- begin and end of a run -----------------------------------------------------------------------


def _run_started(state: State, event: RunStarted) -> Outcome:
    _require(state, event, Phase.NEW)
    settings = event.settings
    state = State(
        settings=settings,
        slots=(Slot(),) * settings.slots,
        workers=(WorkerState.IDLE,) * settings.workers,
        versions=event.versions,
        seq=event.versions.seq,
    )
    return next_call(replace(state, evaluations=evaluations_due(settings, 0)))


def _resumed(state: State, event: Resumed) -> Outcome:
    """Issues again what the state waits for: every call of the former coordinator is gone."""
    if state.phase is Phase.NEW:
        raise MachineError("Resumed", state.describe())
    settings = replace(state.settings, total_steps=max(event.total_steps, state.step))
    lease = state.lease and replace(state.lease, preempting=False)
    state = replace(state, settings=settings, lost=frozenset(), attempts=0, lease=lease)
    if state.failed_phase is not None:
        state = replace(state, phase=state.failed_phase, failed_phase=None, failure="")
    match state.phase:
        case Phase.FINISHED if state.step == settings.total_steps:
            return state, (FinishRun(""),)
        case Phase.ROLLOUT:
            return run_tasks_again(state)
        case Phase.PREEMPT | Phase.DRAFTER:
            return preempt(state)
        case Phase.POLICY:
            return train_policy(state)
        case Phase.COMMIT if state.committing is not None:
            return commit(state, state.committing)
        case _:
            return next_call(state)


def _boundary_call_done(state: State, event: EvaluationDone | CheckpointsSaved) -> Outcome:
    if event.epoch < state.phase_epoch:
        return _refuse(state, event, event.epoch, state.phase_epoch)
    if isinstance(event, CheckpointsSaved):
        _require(state, event, Phase.CLOSING)
        return replace(state, phase=Phase.FINISHED), (FinishRun(""),)
    _require(state, event, Phase.EVALUATE)
    if event.kind is not state.evaluations[0]:
        raise MachineError(f"EvaluationDone({event.kind})", state.describe())
    state = free_slots(state, held_by(state, Holder.ENGINE))
    return next_call(replace(state, evaluations=state.evaluations[1:]))


def _stop_requested(state: State) -> State:
    running = state.phase in (
        Phase.READY,
        Phase.ROLLOUT,
        Phase.PREEMPT,
        Phase.POLICY,
        Phase.DRAFTER,
        Phase.COMMIT,
    )
    last = min(state.settings.total_steps, state.step + (1 if running else 0))
    return replace(state, settings=replace(state.settings, total_steps=last))


# --- rollout --------------------------------------------------------------------------------------


def _step_began(state: State, event: StepBegan) -> Outcome:
    if event.step < state.step:
        return _refuse(state, event, event.step, state.step)
    _require(state, event, Phase.READY)
    if event.step != state.step:
        raise MachineError(f"StepBegan({event.step})", state.describe())
    return generate(replace(state, attempts=0))


def _rollout(state: State, event: ShareDone | TasksFinished | WorkerLost) -> Outcome:
    if event.epoch < state.phase_epoch:
        return _refuse(state, event, event.epoch, state.phase_epoch)
    _require(state, event, Phase.ROLLOUT, epoch=event.epoch)
    match event:
        case ShareDone():
            return lease_drafter(_release(state, event.worker))
        case TasksFinished():
            for worker, worker_state in enumerate(state.workers):
                if worker_state is WorkerState.GENERATING:
                    state = _release(state, worker)
            if state.lease is None:
                return train_policy(replace(state, attempts=0))
            return preempt(replace(state, phase=Phase.PREEMPT, attempts=0))
        case WorkerLost():
            return fail_if_exhausted(
                state, f"worker {event.worker} of the gateway died"
            ) or run_tasks_again(attempted(state))
        case _:
            assert_never(event)


def _release(state: State, worker: int) -> State:
    if worker >= len(state.workers):
        raise MachineError(f"ShareDone(worker={worker})", state.describe())
    state = move_workers(state, [worker], Cause.SHARE_DONE)
    return free_slots(state, worker_slots(state.settings, worker))


# --- drafter --------------------------------------------------------------------------------------


def _drafter(
    state: State, event: DrafterActivated | GatePromoted | Preempted | Detached
) -> Outcome:
    if event.epoch > state.lease_epoch:
        raise MachineError(f"{type(event).__name__}(epoch={event.epoch})", state.describe())
    if isinstance(event, GatePromoted) and event.epoch == state.lease_epoch:
        # A prepared candidate is no right to a slot: it counts even when Preempted overtook it.
        return _promoted(state, event)
    if state.lease is None or event.epoch != state.lease.epoch:
        return _refuse(state, event, event.epoch, state.lease_epoch)
    match event:
        case Detached(reason=reason) if reason != "preempted":
            return _end_lease(state, Cause.DRAFTER_DONE)
        case Preempted() | Detached():
            return _end_lease(state, Cause.PREEMPTED)
        case _:
            return state, ()


def _promoted(state: State, event: GatePromoted) -> Outcome:
    older = state.promoted
    state = replace(state, promoted=event.drafter_version)
    if (
        older is None
        or older == event.drafter_version
        or (state.committing and state.committing.drafter == older)
    ):
        return state, ()
    return state, (AbortDrafter(state.step, state.epoch, older),)


def _end_lease(state: State, cause: Cause, *, fence: bool = False) -> Outcome:
    assert state.lease is not None
    slots = state.lease.slots
    workers = sorted({slot // state.settings.slots_per_worker for slot in slots})
    state = free_slots(move_workers(state, workers, cause), slots, fence=fence)
    state = replace(state, lease=None)
    if state.phase is Phase.PREEMPT:
        return train_policy(state)
    if state.phase is Phase.DRAFTER:
        return commit_prepared(state)
    if state.rollout_restart:
        return generate(state)
    return state, ()


def _acceptance_fell(state: State, event: AcceptanceFell) -> Outcome:
    if event.drafter_version != state.versions.drafter or state.previous_drafter is None:
        return _refuse(state, event, event.drafter_version, state.versions.drafter)
    return replace(state, rollback=True), ()


# --- policy and commit ----------------------------------------------------------------------------


def _policy(state: State, event: PolicyStepped | PolicyPrepared) -> Outcome:
    if event.epoch < state.phase_epoch:
        return _refuse(state, event, event.epoch, state.phase_epoch)
    _require(state, event, Phase.POLICY, epoch=event.epoch)
    if event.policy_version != state.versions.policy + 1:
        raise MachineError(
            f"{type(event).__name__}(policy_version={event.policy_version})", state.describe()
        )
    state = free_slots(state, held_by(state, Holder.POLICY))
    if isinstance(event, PolicyStepped):
        return state, ()
    return train_drafter(replace(state, prepared=event.policy_version))


def _commit_answered(state: State, event: Committed | CommitFailed) -> Outcome:
    if event.versions != state.committing:
        if event.versions.seq <= state.seq:
            return _refuse(state, event, event.versions.seq, state.seq)
        raise MachineError(f"{type(event).__name__}({event.versions})", state.describe())
    _require(state, event, Phase.COMMIT)
    if isinstance(event, CommitFailed):
        return _commit_failed(state, event)
    served, rolled_back = state.versions, is_rollback(state)
    state = replace(state, versions=event.versions, committing=None)
    if event.versions.drafter == state.promoted:
        state = replace(state, promoted=None)
    if event.versions.drafter != served.drafter:
        state = replace(
            state, previous_drafter=None if rolled_back else served.drafter, rollback=False
        )
    if rolled_back:
        return commit_prepared(state)
    finished = state.step + 1
    state = replace(
        state, step=finished, prepared=None, evaluations=evaluations_due(state.settings, finished)
    )
    state, commands = next_call(state)
    return state, (CloseStep(finished - 1), *commands)


def _commit_failed(state: State, event: CommitFailed) -> Outcome:
    """A rollback is given up, a promoted drafter is left out, a policy is pushed again."""
    if is_rollback(state):
        return commit_prepared(replace(state, rollback=False, previous_drafter=None))
    promoted = state.promoted
    if promoted is not None and event.versions.drafter == promoted:
        state, commands = commit_prepared(replace(state, promoted=None))
        return state, (AbortDrafter(state.step, state.epoch, promoted), *commands)
    return fail_if_exhausted(state, f"commit: {event.message}") or train_policy(attempted(state))


# --- losses and deadlines -------------------------------------------------------------------------


def _rank_lost(state: State, event: RankLost) -> Outcome:
    if event.service is Service.DRAFTER_TRAINER:
        if state.lease is None or event.epoch < state.lease.epoch:
            return _refuse(state, event, event.epoch, state.lease_epoch)
        return _end_lease(state, Cause.PREEMPTED, fence=True)
    if event.epoch < state.phase_epoch:
        return _refuse(state, event, event.epoch, state.phase_epoch)
    _require(state, event, Phase.POLICY, epoch=event.epoch)
    return fail_if_exhausted(state, f"{event.service}: {event.message}") or train_policy(
        attempted(state)
    )


def _deadline(state: State, event: Deadline) -> Outcome:
    if event.what in ("activation", "preempt"):
        if state.lease is None or event.epoch < state.lease.epoch:
            return _refuse(state, event, event.epoch, state.lease_epoch)
        if event.what == "activation":
            return preempt(state)
        return _end_lease(state, Cause.PREEMPTED, fence=True)
    if event.epoch < state.phase_epoch:
        return _refuse(state, event, event.epoch, state.phase_epoch)
    return fail(state, f"{event.what} of step {state.step} took longer than {event.seconds:g} s")


def _service_lost(state: State, event: ServiceLost) -> Outcome:
    if event.service in state.lost:
        return state, ()
    state = replace(state, lost=state.lost | {event.service})
    commands: tuple[Command, ...] = ()
    if event.service is Service.DRAFTER_TRAINER and state.lease is not None:
        state, commands = _end_lease(state, Cause.PREEMPTED, fence=True)
    if event.service is Service.GATEWAY and state.phase is Phase.ROLLOUT:
        state, commands = preempt(replace(state, rollout_restart=False))
    return state, (AwaitService(event.service), *commands)


def _service_back(state: State, event: ServiceBack) -> Outcome:
    if event.service not in state.lost:
        return state, ()
    state = replace(state, lost=state.lost - {event.service})
    match state.phase, event.service:
        case Phase.ROLLOUT, Service.GATEWAY:
            return run_tasks_again(state)
        case Phase.POLICY, Service.POLICY_TRAINER:
            return train_policy(state)
        case Phase.COMMIT, Service.GATEWAY | Service.DRAFTER_TRAINER if (
            state.committing is not None
        ):
            return commit(state, state.committing)
        case Phase.EVALUATE, Service.GATEWAY:
            return next_call(state)
        case Phase.CLOSING, Service.POLICY_TRAINER | Service.DRAFTER_TRAINER:
            return next_call(state)
        case _:
            return state, ()


def _refuse(state: State, event: Event, seen: int, current: int) -> Outcome:
    return state, (Refuse(type(event).__name__, seen, current),)


def _require(state: State, event: Event, phase: Phase, *, epoch: int | None = None) -> None:
    if state.phase is not phase or (epoch is not None and epoch != state.phase_epoch):
        detail = "" if epoch is None else f"(epoch={epoch})"
        raise MachineError(f"{type(event).__name__}{detail}", state.describe())
