"""Decides a run: `step(state, event) -> (state, commands)`, a pure function.

A run is in one phase. While the phase is RUNNING, each of two tracks has a phase of its own: the
rollouts, which generate, and the learner, which trains the results. Three tables define the
machine:

- PHASES: the action on entering a phase, and the phases that may follow.
- EVENTS: for each event its legal phases, the condition that makes it late, and its handler. A
  handler returns the new state and, at the end of a phase, the phase to enter.
- RULES (`rules.py`): actions that a track starts by itself, such as the next step's tasks or the
  next batch. The rules are applied until none holds. `schedule.py` has their conditions.

An RL step is one round of each track:

    READY -> ROLLOUT -> READY        IDLE -> PREEMPT -> POLICY -> DRAFTER -> COMMIT -> IDLE

DRAFTER takes no time except in the serial drafter's schedule. In the schedule `sync` the tracks
take turns. In the other schedules they may be one or more steps apart.

Two things have states beside the phases: each worker (WORKER_TRANSITIONS) and the drafter's lease.
The lease ends before its workers generate again and, on shared slots, before the policy trains.

If a call is lost, because a service is down or the coordinator restarted, the machine repeats the
call under a new epoch. Answers under the old epoch are late, and so are repeated events. A late
event changes nothing and returns Refuse. An impossible event raises MachineError.

The machine uses no clock and no random numbers. The same events give the same state and the same
commands, so a journal can be replayed.
"""

from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any, NamedTuple

from paceline.services.coordinator.machine import (
    drafter,
    events,
    learner,
    losses,
    rollout,
    rules,
    slots,
)
from paceline.services.coordinator.machine.commands import Command, Decision, Quarantine, refused
from paceline.services.coordinator.machine.events import PathsBeyondBound
from paceline.services.coordinator.machine.rollout import draw_of
from paceline.services.coordinator.machine.rules import follow
from paceline.services.coordinator.machine.state import MachineError, Phase, Service, State


def quarantined(state: State, event: PathsBeyondBound) -> Decision:
    """Adds the paths to the quarantine in order of discovery; quarantined paths change nothing."""
    new = tuple(dict.fromkeys(path for path in event.paths if path not in state.quarantined))
    if not new:
        return Decision(state)
    state = replace(state, quarantined=state.quarantined + new)
    return Decision(state, (Quarantine(state.step, event.epoch, state.quarantined),))


class Mark(NamedTuple):
    """The event's value of `name` beside the current value; late if it is smaller, or if the call
    is over.
    """

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


def all_begun(state: State, event: events.Paused) -> Mark:
    """Late when all steps have begun."""
    return Mark("", 0, 0, over=state.all_begun)


def step_number(state: State, event: events.StepBegan) -> Mark:
    """Late when the step has begun."""
    rollouts = state.rollouts
    newest = rollouts.step if rollouts.drawing else rollouts.step - 1
    return Mark("step", event.step, newest, over=not rollouts.drawing)


def call(state: State, event: events.CallAnswer) -> Mark:
    """Late when the call has been answered or issued again."""
    over = state.phase not in (Phase.EVALUATE, Phase.CLOSING)
    return Mark("epoch", event.epoch, state.phase_epoch, over)


def learner_call(state: State, event: events.CallAnswer) -> Mark:
    """Late when the learner's call has been answered or made again."""
    committing = state.learner.phase is Phase.COMMIT and state.committing is not None
    over = state.learner.phase is not Phase.POLICY and not committing
    return Mark("epoch", event.epoch, state.learner.epoch, over)


def rollout_call(state: State, event: events.CallAnswer) -> Mark:
    """Late when the step's call has been answered or made again."""
    over = draw_of(state, event.epoch) is None  # an older call may go on beside the newest
    return Mark("epoch", event.epoch, state.rollouts.epoch if over else event.epoch, over)


def share(state: State, event: events.ShareDone) -> Mark:
    """Late when the step's call has been answered or made again, or the worker's share is done."""
    mark, draw = rollout_call(state, event), draw_of(state, event.epoch)
    if draw is not None and event.worker < len(state.workers):
        return mark._replace(over=not draw.owed >> event.worker & 1)
    return mark


def group(state: State, event: events.GroupClosed) -> Mark:
    """Late when the step's call has been answered or made again, or the group is closed."""
    mark, draw = rollout_call(state, event), draw_of(state, event.epoch)
    return mark if draw is None else mark._replace(over=bool(draw.closed >> event.index & 1))


def lease(state: State, event: events.CallAnswer) -> Mark:
    """Late when the drafter's lease is over."""
    return Mark("epoch", event.epoch, state.lease_epoch, over=state.lease is None)


def newest_lease(state: State, event: events.GatePromoted) -> Mark:
    """Late when there is a newer lease or candidate; an ended lease does not matter."""
    over = (event.epoch, event.drafter_version) <= state.candidate
    return Mark("epoch", event.epoch, state.lease_epoch, over)


def lease_or_call(
    state: State, event: events.TrainerFailed | events.Deadline | events.WorkersReleased
) -> Mark:
    """Late when the lease is over, for events of the drafter; else when their call has been
    answered or made again.
    """
    if isinstance(event, events.TrainerFailed):
        of_drafter = event.service is Service.DRAFTER_TRAINER
    elif isinstance(event, events.WorkersReleased):
        of_drafter = event.holder is slots.Holder.DRAFTER
    else:
        return DEADLINES.get(event.what, call)(state, event)
    return lease(state, event) if of_drafter else learner_call(state, event)


DEADLINES: dict[str, Callable[[State, events.CallAnswer], Mark]] = {
    "activation": lease,
    "join": lease,
    "preempt": lease,
    "rollout": rollout_call,
    "policy": learner_call,
    "commit": learner_call,
}
"""Mark of a Deadline by the kind of its wait; `call` for all other kinds."""


def set_number(state: State, event: events.Committed | events.CommitFailed) -> Mark:
    """Late when another set is being committed."""
    over = event.versions != state.committing
    return Mark("seq", event.versions.seq, state.seq, over)


class PhaseRow(NamedTuple):
    """The calls on entering a phase, and the phases that may follow; FAILED may follow each phase
    of the run.
    """

    enter: Callable[[State], Decision]
    then: tuple[Phase, ...]


RUN: dict[Phase, PhaseRow] = {
    Phase.NEW: PhaseRow(Decision, (Phase.RUNNING,)),
    Phase.RUNNING: PhaseRow(Decision, (Phase.PAUSED, Phase.EVALUATE, Phase.CLOSING)),
    Phase.PAUSED: PhaseRow(rules.pause, (Phase.RUNNING,)),
    Phase.EVALUATE: PhaseRow(rules.evaluate, (Phase.RUNNING,)),
    Phase.CLOSING: PhaseRow(rules.close, (Phase.FINISHED, Phase.RUNNING)),
    Phase.FINISHED: PhaseRow(rules.finish, (Phase.RUNNING,)),
    Phase.FAILED: PhaseRow(losses.give_up, ()),
}
ROLLOUTS: dict[Phase, PhaseRow] = {
    Phase.READY: PhaseRow(Decision, (Phase.ROLLOUT,)),
    Phase.ROLLOUT: PhaseRow(rollout.generate, (Phase.READY, Phase.SUSPENDED)),
    Phase.SUSPENDED: PhaseRow(rollout.suspend, (Phase.ROLLOUT, Phase.READY)),
}
LEARNER: dict[Phase, PhaseRow] = {
    Phase.IDLE: PhaseRow(Decision, (Phase.PREEMPT,)),
    Phase.PREEMPT: PhaseRow(learner.wait_for_slots, (Phase.POLICY,)),
    Phase.POLICY: PhaseRow(learner.train, (Phase.DRAFTER, Phase.PREEMPT)),
    Phase.DRAFTER: PhaseRow(drafter.train_alone, (Phase.COMMIT,)),
    Phase.COMMIT: PhaseRow(learner.serve, (Phase.IDLE, Phase.PREEMPT)),
}
PHASES = {**RUN, **ROLLOUTS, **LEARNER}


class EventRow(NamedTuple):
    """The phases in which an event may arrive, the condition under which it is late, and its
    handler.
    """

    phases: Set[Phase]
    late: Callable[[State, Any], Mark]
    handle: Callable[[State, Any], Decision]


BEGUN = set(RUN) - {Phase.NEW}
LIVE = BEGUN - {Phase.FINISHED, Phase.FAILED}
RUNNING = {Phase.RUNNING}
GENERATING = {Phase.ROLLOUT, Phase.SUSPENDED}

EVENTS: dict[type[events.Event], EventRow] = {
    events.RunStarted: EventRow({Phase.NEW}, begin, rules.run_started),
    events.Resumed: EventRow(BEGUN, none, rules.resumed),
    events.StopRequested: EventRow(LIVE, none, rules.stop_requested),
    events.Paused: EventRow(LIVE, all_begun, rules.paused),
    events.Continued: EventRow(LIVE, none, rules.paused),
    events.EvaluationDone: EventRow({Phase.EVALUATE}, call, rules.evaluation_done),
    events.CheckpointsSaved: EventRow({Phase.CLOSING}, call, rules.checkpoints_saved),
    events.StepBegan: EventRow(RUNNING, step_number, rollout.step_began),
    events.GroupClosed: EventRow(GENERATING, group, rollout.group_closed),
    events.ShareDone: EventRow(GENERATING, share, rollout.share_done),
    events.TasksFinished: EventRow(GENERATING, rollout_call, rollout.tasks_finished),
    events.WorkerLost: EventRow(GENERATING, rollout_call, rollout.worker_lost),
    events.SetDamaged: EventRow(GENERATING, rollout_call, rollout.set_damaged),
    events.WorkersReleased: EventRow(RUNNING, lease_or_call, drafter.noted),
    events.DrafterActivated: EventRow(RUNNING, lease, drafter.attached),
    events.DrafterJoined: EventRow(RUNNING, lease, drafter.attached),
    events.JoinFailed: EventRow(RUNNING, lease, drafter.end_activation),
    events.TrafficWaits: EventRow(RUNNING, lease, drafter.end_activation),
    events.GatePromoted: EventRow(LIVE, newest_lease, drafter.promoted),
    events.GateDecided: EventRow(LIVE, none, drafter.noted),
    events.Preempted: EventRow(RUNNING, lease, drafter.preempted),
    events.Detached: EventRow(RUNNING, lease, drafter.detached),
    events.AcceptanceFell: EventRow(LIVE, none, drafter.acceptance_fell),
    events.PolicyStepped: EventRow({Phase.POLICY}, learner_call, learner.stepped),
    events.PathsBeyondBound: EventRow({Phase.POLICY}, learner_call, quarantined),
    events.PolicyPrepared: EventRow({Phase.POLICY}, learner_call, learner.prepared),
    events.Committed: EventRow({Phase.COMMIT}, set_number, learner.committed),
    events.CommitFailed: EventRow({Phase.COMMIT}, set_number, learner.commit_failed),
    events.TrainerFailed: EventRow(RUNNING, lease_or_call, losses.trainer_failed),
    events.Deadline: EventRow(LIVE, lease_or_call, losses.deadline),
    events.ServiceLost: EventRow(LIVE, none, losses.service_lost),
    events.ServiceBack: EventRow(LIVE, none, losses.service_back),
    events.CallFailed: EventRow(LIVE, none, losses.call_failed),
}


def step(state: State, event: events.Event) -> tuple[State, tuple[Command, ...]]:
    """The state after `event`, and the commands. Raises MachineError for an illegal event."""
    before = state
    state, commands, entered = _handle(state, event)
    if state is before and entered is None:
        return state, commands  # nothing has changed, so no rule applies
    while True:
        if entered is not None:
            state, more, entered = _enter(state, entered)
        elif (begun := follow(state)) is not None:
            state, more, entered = begun
        else:
            return state, commands
        commands += more


def _handle(state: State, event: events.Event) -> Decision:
    row = EVENTS[type(event)]
    if state.phase in (Phase.FINISHED, Phase.FAILED) and state.phase not in row.phases:
        return refused(state, event, state.step, state.step)
    mark = row.late(state, event)
    unknown = mark.seen > mark.current
    if not unknown and (mark.over or mark.seen < mark.current):
        return refused(state, event, mark.seen, mark.current)
    if unknown or not state.phases & row.phases:
        carried = f"({mark.name}={mark.seen})" if mark.name else ""
        raise MachineError(f"{type(event).__name__}{carried}", state.describe())
    return row.handle(state, event)


def _enter(state: State, phase: Phase) -> Decision:
    if phase in ROLLOUTS:
        now, entered = state.rollouts.phase, state.with_rollouts(phase=phase)
    elif phase in LEARNER:
        now, entered = state.learner.phase, state.with_learner(phase=phase)
    else:
        now, entered = state.phase, replace(state, phase=phase)
    if phase not in (now, Phase.FAILED, *PHASES[now].then):
        raise MachineError(f"entering {phase}", state.describe())
    return PHASES[phase].enter(entered)
