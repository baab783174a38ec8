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

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any, NamedTuple

from paceline.services.coordinator.machine import (
    audit,
    boundary,
    choice,
    commit,
    drafter,
    events,
    losses,
    policy,
    rollout,
)
from paceline.services.coordinator.machine.commands import Command
from paceline.services.coordinator.machine.decision import Decision, refused
from paceline.services.coordinator.machine.marks import (
    Mark,
    begin,
    call,
    group,
    learner_call,
    lease,
    lease_or_call,
    newest_lease,
    none,
    rollout_call,
    set_number,
    share,
    step_number,
)
from paceline.services.coordinator.machine.rules import follow
from paceline.services.coordinator.machine.state import (
    MachineError,
    Phase,
    State,
    with_learner,
    with_rollouts,
)


class PhaseRow(NamedTuple):
    """The calls on entering a phase, and the phases that may follow; FAILED may follow each phase
    of the run.
    """

    enter: Callable[[State], Decision]
    then: tuple[Phase, ...]


RUN: dict[Phase, PhaseRow] = {
    Phase.NEW: PhaseRow(Decision, (Phase.RUNNING,)),
    Phase.RUNNING: PhaseRow(Decision, (Phase.PAUSED, Phase.EVALUATE, Phase.CLOSING)),
    Phase.PAUSED: PhaseRow(boundary.pause, (Phase.RUNNING,)),
    Phase.EVALUATE: PhaseRow(boundary.evaluate, (Phase.RUNNING,)),
    Phase.CLOSING: PhaseRow(boundary.close, (Phase.FINISHED, Phase.RUNNING)),
    Phase.FINISHED: PhaseRow(boundary.finish, (Phase.RUNNING,)),
    Phase.FAILED: PhaseRow(losses.give_up, ()),
}
ROLLOUTS: dict[Phase, PhaseRow] = {
    Phase.READY: PhaseRow(Decision, (Phase.ROLLOUT,)),
    Phase.ROLLOUT: PhaseRow(rollout.generate, (Phase.READY, Phase.SUSPENDED)),
    Phase.SUSPENDED: PhaseRow(rollout.suspend, (Phase.ROLLOUT, Phase.READY)),
}
LEARNER: dict[Phase, PhaseRow] = {
    Phase.IDLE: PhaseRow(Decision, (Phase.PREEMPT,)),
    Phase.PREEMPT: PhaseRow(policy.wait_for_slots, (Phase.POLICY,)),
    Phase.POLICY: PhaseRow(policy.train, (Phase.DRAFTER, Phase.PREEMPT)),
    Phase.DRAFTER: PhaseRow(drafter.train_alone, (Phase.COMMIT,)),
    Phase.COMMIT: PhaseRow(commit.serve, (Phase.IDLE, Phase.PREEMPT)),
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
    events.RunStarted: EventRow({Phase.NEW}, begin, boundary.run_started),
    events.Resumed: EventRow(BEGUN, none, boundary.resumed),
    events.StopRequested: EventRow(LIVE, none, boundary.stop_requested),
    events.Paused: EventRow(LIVE, none, choice.paused),
    events.Continued: EventRow(LIVE, none, choice.continued),
    events.DrafterChosen: EventRow(LIVE, none, choice.drafter_chosen),
    events.DrafterUnpinned: EventRow(LIVE, none, choice.drafter_unpinned),
    events.ProfileChosen: EventRow(LIVE, none, choice.profile_chosen),
    events.EvaluationDone: EventRow({Phase.EVALUATE}, call, boundary.evaluation_done),
    events.CheckpointsSaved: EventRow({Phase.CLOSING}, call, boundary.checkpoints_saved),
    events.StepBegan: EventRow(RUNNING, step_number, rollout.step_began),
    events.GroupClosed: EventRow(GENERATING, group, rollout.group_closed),
    events.ShareDone: EventRow(GENERATING, share, rollout.share_done),
    events.TasksFinished: EventRow(GENERATING, rollout_call, rollout.tasks_finished),
    events.WorkerLost: EventRow(GENERATING, rollout_call, rollout.worker_lost),
    events.SetDamaged: EventRow(GENERATING, rollout_call, rollout.set_damaged),
    events.WorkersReleased: EventRow(RUNNING, lease_or_call, drafter.noted),
    events.DrafterActivated: EventRow(RUNNING, lease, drafter.attached),
    events.DrafterJoined: EventRow(RUNNING, lease, drafter.attached),
    events.JoinFailed: EventRow(RUNNING, lease, drafter.join_failed),
    events.TrafficWaits: EventRow(RUNNING, lease, drafter.reclaim),
    events.GatePromoted: EventRow(LIVE, newest_lease, drafter.promoted),
    events.GateDecided: EventRow(LIVE, none, drafter.noted),
    events.Preempted: EventRow(RUNNING, lease, drafter.preempted),
    events.Detached: EventRow(RUNNING, lease, drafter.detached),
    events.AcceptanceFell: EventRow(LIVE, none, drafter.acceptance_fell),
    events.PolicyStepped: EventRow({Phase.POLICY}, learner_call, policy.stepped),
    events.PathsBeyondBound: EventRow({Phase.POLICY}, learner_call, audit.quarantined),
    events.PolicyPrepared: EventRow({Phase.POLICY}, learner_call, policy.prepared),
    events.Committed: EventRow({Phase.COMMIT}, set_number, commit.committed),
    events.CommitFailed: EventRow({Phase.COMMIT}, set_number, commit.commit_failed),
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
        now, entered = state.rollouts.phase, with_rollouts(state, phase=phase)
    elif phase in LEARNER:
        now, entered = state.learner.phase, with_learner(state, phase=phase)
    else:
        now, entered = state.phase, replace(state, phase=phase)
    if phase not in (now, Phase.FAILED, *PHASES[now].then):
        raise MachineError(f"entering {phase}", state.describe())
    return PHASES[phase].enter(entered)
