"""Decides a run: `step(state, event) -> (state, commands)`, pure.

A run is in one phase, and while that is RUNNING each of its two tracks is in one of its own: the
rollouts, which generate, and the learner, which trains what they have brought. PHASES says what a
phase asks for when it is entered and which phases may follow it. EVENTS says for each event in
which phases it may come, what makes it late, and who handles it. A handler returns the state after
the event and, where a phase is over, the phase to enter. What a track then begins by itself, with
the tasks of the next step or a batch, stands in RULES (`rules.py`), of which one after the other
is followed until none holds; `schedule.py` has their conditions. So an RL step is one round of each
track,

    READY -> ROLLOUT -> READY        IDLE -> PREEMPT -> POLICY -> DRAFTER -> COMMIT -> IDLE

of which DRAFTER is passed at once outside the serial drafter's schedule. In the schedule `sync` the
tracks take turns; in the others they are several steps apart.

Two things have states beside the phases: each worker (WORKER_TRANSITIONS), and the drafter's lease,
which is over before its workers generate again and, where they share slots, before the policy
trains. Whatever loses a call, a service that is away or a
coordinator that is started again, has it made once more: under a new epoch, and what the old one
still answers is late, as is everything that comes a second time. A late event changes nothing and
is answered by Refuse; one that cannot happen raises MachineError.

No clock and no randomness: the same events give the same state and the same commands, so a journal
replays.
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
    """What entering a phase asks for, and the phases that may follow; FAILED may follow all of the
    run's.
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
    """In which phases an event may come, what makes it late, and who handles it."""

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
    """The state after `event` and what is to be done. Raises MachineError for an illegal event."""
    before = state
    state, commands, entered = _handle(state, event)
    if state is before and entered is None:
        return state, commands  # nothing has changed, so nothing begins
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
