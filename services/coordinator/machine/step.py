"""Decides a run: `step(state, event) -> (state, commands)`, pure.

A run is in one phase and waits for the call that the phase has made. PHASES says what a phase asks
for when it is entered and which phases may follow it. EVENTS says for each event in which phases it
may come, what makes it late, and who handles it. A handler returns the state after the event and,
where the phase is over, the phase to enter. A phase that need not wait enters the next at once, so
an RL step is one round,

    READY -> ROLLOUT -> PREEMPT -> POLICY -> DRAFTER -> COMMIT -> READY

of which PREEMPT is passed without a lease and DRAFTER outside the serial schedule.

Two things have states beside the phase: each worker (WORKER_TRANSITIONS), and the drafter's lease,
which begins in ROLLOUT or DRAFTER and is over before POLICY or COMMIT. Whatever loses a call, a
service that is away or a coordinator that is started again, enters the phase again: the call is
made under a new epoch, and what the old one still answers is late, as is everything that comes a
second time. A late event changes nothing and is answered by Refuse; one that cannot happen raises
MachineError.

No clock and no randomness: the same events give the same state and the same commands, so a journal
replays.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any, NamedTuple

from coordinator.machine import boundary, commit, drafter, events, losses, policy, rollout
from coordinator.machine.commands import Command
from coordinator.machine.decision import Decision, refused
from coordinator.machine.state import Holder, MachineError, Phase, Service, State, WorkerState


class PhaseRow(NamedTuple):
    """What entering a phase asks for, and the phases that may follow; FAILED may follow all."""

    enter: Callable[[State], Decision]
    then: tuple[Phase, ...]


PHASES: dict[Phase, PhaseRow] = {
    Phase.NEW: PhaseRow(Decision, (Phase.READY,)),
    Phase.READY: PhaseRow(boundary.next_step, (Phase.EVALUATE, Phase.ROLLOUT, Phase.CLOSING)),
    Phase.EVALUATE: PhaseRow(boundary.evaluate, (Phase.READY,)),
    Phase.ROLLOUT: PhaseRow(rollout.generate, (Phase.PREEMPT,)),
    Phase.PREEMPT: PhaseRow(drafter.take_back, (Phase.POLICY,)),
    Phase.POLICY: PhaseRow(policy.train, (Phase.DRAFTER,)),
    Phase.DRAFTER: PhaseRow(drafter.train_alone, (Phase.COMMIT,)),
    Phase.COMMIT: PhaseRow(commit.serve, (Phase.READY, Phase.POLICY)),
    Phase.CLOSING: PhaseRow(boundary.close, (Phase.FINISHED, Phase.READY)),
    Phase.FINISHED: PhaseRow(boundary.finish, (Phase.READY,)),
    Phase.FAILED: PhaseRow(losses.give_up, ()),
}


class Mark(NamedTuple):
    """What an event carries of `name` beside the current value: late when smaller or over."""

    name: str
    seen: int
    current: int
    over: bool = False


def none(state: State, event: events.Event) -> Mark:
    """Never late."""
    return Mark("", 0, 0)


def begin(state: State, event: events.RunStarted) -> Mark:
    """Late when the run has begun."""
    return Mark("", 0, 0, over=state.phase is not Phase.NEW)


def step_number(state: State, event: events.StepBegan) -> Mark:
    """Late when the step has begun."""
    over = state.phase not in (Phase.NEW, Phase.READY)
    return Mark("step", event.step, state.step, over)


def call(state: State, event: events.CallAnswer) -> Mark:
    """Late when the call has been answered or made again."""
    over = state.phase not in losses.CALLED_IN
    return Mark("epoch", event.epoch, state.phase_epoch, over)


def share(state: State, event: events.ShareDone) -> Mark:
    """As `call` has it, and when the worker has released its slots."""
    mark = call(state, event)
    known = state.phase is Phase.ROLLOUT and event.worker < len(state.workers)
    if known and state.workers[event.worker] is not WorkerState.GENERATING:
        return mark._replace(over=True)
    return mark


def lease(state: State, event: events.CallAnswer) -> Mark:
    """Late when the drafter's lease is over."""
    return Mark("epoch", event.epoch, state.lease_epoch, over=state.lease is None)


def newest_lease(state: State, event: events.GatePromoted) -> Mark:
    """Late when there is a newer lease or candidate; a lease that is over is no matter."""
    over = (event.epoch, event.drafter_version) <= state.candidate
    return Mark("epoch", event.epoch, state.lease_epoch, over)


def lease_or_call(
    state: State, event: events.TrainerFailed | events.Deadline | events.WorkersReleased
) -> Mark:
    """Late as `lease` has it for news of the drafter, else as `call` has it."""
    if isinstance(event, events.TrainerFailed):
        of_drafter = event.service is Service.DRAFTER_TRAINER
    elif isinstance(event, events.WorkersReleased):
        of_drafter = event.holder is Holder.DRAFTER
    else:
        of_drafter = event.what in ("activation", "preempt")
    return lease(state, event) if of_drafter else call(state, event)


def set_number(state: State, event: events.Committed | events.CommitFailed) -> Mark:
    """Late when another set is being committed."""
    over = event.versions != state.committing
    return Mark("seq", event.versions.seq, state.seq, over)


class EventRow(NamedTuple):
    """In which phases an event may come, what makes it late, and who handles it."""

    phases: Set[Phase]
    late: Callable[[State, Any], Mark]
    handle: Callable[[State, Any], Decision]


BEGUN = set(Phase) - {Phase.NEW}
LIVE = BEGUN - {Phase.FINISHED, Phase.FAILED}
LEASED = {Phase.ROLLOUT, Phase.PREEMPT, Phase.DRAFTER}

EVENTS: dict[type[events.Event], EventRow] = {
    events.RunStarted: EventRow({Phase.NEW}, begin, boundary.run_started),
    events.Resumed: EventRow(BEGUN, none, boundary.resumed),
    events.StopRequested: EventRow(LIVE, none, boundary.stop_requested),
    events.EvaluationDone: EventRow({Phase.EVALUATE}, call, boundary.evaluation_done),
    events.CheckpointsSaved: EventRow({Phase.CLOSING}, call, boundary.checkpoints_saved),
    events.StepBegan: EventRow({Phase.READY}, step_number, rollout.step_began),
    events.ShareDone: EventRow({Phase.ROLLOUT}, share, rollout.share_done),
    events.TasksFinished: EventRow({Phase.ROLLOUT}, call, rollout.tasks_finished),
    events.WorkerLost: EventRow({Phase.ROLLOUT}, call, rollout.worker_lost),
    events.WorkersReleased: EventRow(LEASED | {Phase.POLICY}, lease_or_call, drafter.noted),
    events.DrafterActivated: EventRow(LEASED, lease, drafter.noted),
    events.GatePromoted: EventRow(LIVE, newest_lease, drafter.promoted),
    events.GateDecided: EventRow(LIVE, none, drafter.noted),
    events.Preempted: EventRow(LEASED, lease, drafter.preempted),
    events.Detached: EventRow(LEASED, lease, drafter.detached),
    events.AcceptanceFell: EventRow(LIVE, none, drafter.acceptance_fell),
    events.PolicyStepped: EventRow({Phase.POLICY}, call, policy.stepped),
    events.PolicyPrepared: EventRow({Phase.POLICY}, call, policy.prepared),
    events.Committed: EventRow({Phase.COMMIT}, set_number, commit.committed),
    events.CommitFailed: EventRow({Phase.COMMIT}, set_number, commit.commit_failed),
    events.TrainerFailed: EventRow(LEASED | {Phase.POLICY}, lease_or_call, losses.trainer_failed),
    events.Deadline: EventRow(LIVE, lease_or_call, losses.deadline),
    events.ServiceLost: EventRow(LIVE, none, losses.service_lost),
    events.ServiceBack: EventRow(LIVE, none, losses.service_back),
    events.CallFailed: EventRow(LIVE, none, losses.call_failed),
}


def step(state: State, event: events.Event) -> tuple[State, tuple[Command, ...]]:
    """The state after `event` and what is to be done. Raises MachineError for an illegal event."""
    state, commands, entered = _handle(state, event)
    while entered is not None:
        state, more, entered = _enter(state, entered)
        commands += more
    return state, commands


def _handle(state: State, event: events.Event) -> Decision:
    row = EVENTS[type(event)]
    if state.phase in (Phase.FINISHED, Phase.FAILED) and state.phase not in row.phases:
        return refused(state, event, state.step, state.step)
    mark = row.late(state, event)
    unknown = mark.seen > mark.current
    if not unknown and (mark.over or mark.seen < mark.current):
        return refused(state, event, mark.seen, mark.current)
    if unknown or state.phase not in row.phases:
        carried = f"({mark.name}={mark.seen})" if mark.name else ""
        raise MachineError(f"{type(event).__name__}{carried}", state.describe())
    return row.handle(state, event)


def _enter(state: State, phase: Phase) -> Decision:
    if phase not in (state.phase, Phase.FAILED, *PHASES[state.phase].then):
        raise MachineError(f"entering {phase}", state.describe())
    return PHASES[phase].enter(replace(state, phase=phase))
