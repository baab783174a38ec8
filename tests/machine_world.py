"""Explores all runs of the coordinator's machine with peers that answer in any order, fail and
recover.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.commands import Command
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.schedule import bits
from paceline.services.coordinator.machine.settings import RunSettings, Schedule
from paceline.services.coordinator.machine.state import OPTIONAL, DrawnStep, Phase, Service, State
from paceline.services.coordinator.machine.step import LIVE, step
from paceline.trajectory import VersionSet

CALLS_OF: dict[Service, tuple[type[Command], ...]] = {
    Service.GATEWAY: (
        commands.RunTasks,
        commands.Commit,
        commands.Evaluate,
        commands.TrainPolicy,  # its slots' workers leave first
        commands.JoinDrafter,
    ),
    Service.POLICY_TRAINER: (
        commands.TrainPolicy,
        commands.SaveCheckpoints,
        commands.RunTasks,  # it pushes damaged weights again
        commands.Evaluate,
    ),
    Service.DRAFTER_TRAINER: (
        commands.ActivateDrafter,
        commands.JoinDrafter,
        commands.PreemptDrafter,
    ),
}
_EQUAL = "equal"
"""Marks the words for a group with equal rewards."""
NOT_CALLS = (
    *(commands.CloseStep, commands.AbortDrafter, commands.ResumeWorkers, commands.Refuse),
    *(commands.HandBack, commands.FinishRun),
)


TRACK_OF: dict[type[Command], str] = {
    commands.RunTasks: "rollouts",
    commands.TrainPolicy: "learner",
    commands.Commit: "learner",
    commands.ActivateDrafter: "drafter",
    commands.JoinDrafter: "drafter",
    commands.PreemptDrafter: "drafter",
    commands.Evaluate: "run",
    commands.SaveCheckpoints: "run",
}
"""Track of the lease epoch that a call's epoch is compared with."""


class Call(NamedTuple):
    """A command in progress."""

    command: Command
    said: frozenset[int | str] = frozenset()

    @property
    def kind(self) -> object:
        """One call of a kind runs at a time, but the machine may await several services and roll
        out several steps.
        """
        if isinstance(self.command, commands.AwaitService):
            return self.command.service
        if isinstance(self.command, commands.RunTasks):
            return f"RunTasks {self.command.step}"
        return type(self.command).__name__


class World(NamedTuple):
    """The machine and the calls of its peers."""

    state: State
    calls: tuple[Call, ...]  # by kind
    faults: int  # faults that may still happen
    pauses: int = 0  # an operator's pause commands that may still follow


class Move(NamedTuple):
    """A possible event in a world."""

    event: Event
    calls: tuple[Call, ...]  # calls that continue
    faults: int = 0  # faults that the move uses
    pauses: int = 0  # as of World


@dataclass(slots=True)
class Explored:
    """Every reachable world."""

    worlds: list[World] = field(default_factory=list)
    states: dict[State, State] = field(default_factory=dict)  # each state is one object
    moves: int = 0
    before: dict[int, list[int]] = field(default_factory=dict)  # predecessors by fault-free moves

    def lead_to(self, wanted: Callable[[State], bool]) -> set[int]:
        """Numbers of the worlds from which a wanted state can be reached without another fault. The
        only operator's command on the way is Continued for a paused run.
        """
        found = {i for i, world in enumerate(self.worlds) if wanted(world.state)}
        waiting = list(found)
        while waiting:
            for earlier in self.before.get(waiting.pop(), ()):
                if earlier not in found:
                    found.add(earlier)
                    waiting.append(earlier)
        return found


@dataclass(frozen=True, slots=True)
class Checks:
    """Invariants, grouped by their arguments; a check raises AssertionError."""

    state: Callable[[State], None]  # every state
    change: Callable[[State, State], None]  # every state and the one before it
    move: Callable[[World, Move, World], None]


def explore(settings: RunSettings, faults: int, checks: Checks, pauses: int = 0) -> Explored:
    """Explores every interleaving of a run with at most so many faults and so many pause commands.
    `checks` run on each move.
    """
    with _without_collections():
        state, issued = step(State(), events.RunStarted(0.0, settings, VersionSet()))
        return _explore(World(state, made((), issued), faults, pauses), checks)


def _explore(first: World, checks: Checks) -> Explored:
    state = first.state
    found, numbers = Explored([first], {state: state}), _Numbers(first)
    waiting, changes = deque([0]), set[tuple[int, int]]()
    while waiting:
        number = waiting.popleft()
        world = found.worlds[number]
        for move in moves(world):
            found.moves += 1
            after = play(world, move)
            state = found.states.setdefault(after.state, after.state)
            try:
                if state is after.state is not world.state:
                    checks.state(state)
                after = after._replace(state=state)
                if (change := (id(world.state), id(state))) not in changes:
                    checks.change(world.state, state)
                    changes.add(change)
                checks.move(world, move, after)
            except AssertionError as error:
                called = f"{move.event} in {world.state} with {world.calls}"
                error.add_note(f"{called} gives {after.state}")
                raise
            reached = numbers.of(after)
            if reached == len(found.worlds):
                found.worlds.append(after)
                waiting.append(reached)
            if not (move.faults or move.pauses):
                found.before.setdefault(reached, []).append(number)
    return found


class _Numbers:
    """Numbers of worlds by their keys; a repeated world needs no new key."""

    def __init__(self, first: World) -> None:
        self._by_name = {key(first): 0}
        self._by_world: dict[tuple[object, ...], int] = {}

    def of(self, world: World) -> int:
        """The world's number; a new world gets the next number."""
        same = (id(world.state), world.calls, world.faults, world.pauses)
        if (number := self._by_world.get(same)) is None:
            number = self._by_name.setdefault(key(world), len(self._by_name))
            self._by_world[same] = number
        return number


@contextmanager
def _without_collections() -> Iterator[None]:
    """Worlds hold no reference cycles, and a search for cycles among 100,000 worlds takes long."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def play(world: World, move: Move) -> World:
    """The world after a move."""
    state, issued = step(world.state, move.event)
    left = world.faults - move.faults, world.pauses - move.pauses
    return World(state, made(move.calls, issued), *left)


def made(calls: tuple[Call, ...], issued: tuple[Command, ...]) -> tuple[Call, ...]:
    """The calls after commands; each command ends an older call of its kind."""
    by_kind = {call.kind: call for call in calls}
    for command in issued:
        if not isinstance(command, NOT_CALLS):
            by_kind[Call(command).kind] = Call(command)
    return tuple(sorted(by_kind.values(), key=lambda call: str(call.kind)))


def moves(world: World) -> Iterator[Move]:
    """All possible moves: answers in any order, and faults while any are left."""
    state, calls = world.state, world.calls
    for call in calls:
        others = tuple(one for one in calls if one is not call)
        for event, said in answers(call, state):
            more = () if said is None else (call._replace(said=call.said | {said}),)
            yield Move(event, tuple(sorted(others + more, key=lambda one: str(one.kind))))
        if world.faults:
            yield from (Move(event, others, 1) for event in failures(call))
    if state.previous_drafter is not None and not state.rollback and state.phase in LIVE:
        yield Move(events.AcceptanceFell(0.0, state.versions.drafter), calls)
    if state.phase is Phase.FAILED:
        yield Move(events.Resumed(0.0, state.settings.total_steps), ())
    yield from about_a_pause(world)
    if not world.faults or state.phase not in LIVE:
        return
    yield Move(events.Resumed(0.0, state.settings.total_steps), (), 1)
    yield Move(events.StopRequested(0.0), calls, 1)
    for service, kinds in CALLS_OF.items():
        left = tuple(call for call in calls if not isinstance(call.command, kinds))
        if service not in state.lost and (len(left) < len(calls) or service in OPTIONAL):
            yield Move(events.ServiceLost(0.0, service, "away"), left, 1)


def about_a_pause(world: World) -> Iterator[Move]:
    """An operator's commands about a pause; a run at rest always gets Continued."""
    state = world.state
    if state.phase is Phase.PAUSED:
        yield Move(events.Continued(0.0), world.calls)
    elif world.pauses and state.phase in LIVE:
        said = events.Continued if state.paused else events.Paused
        yield Move(said(0.0), world.calls, pauses=1)


def answers(call: Call, state: State) -> Iterator[tuple[Event, int | str | None]]:
    """Next events of a call, each with the word noted for it; None marks the last event."""
    match call.command:
        case commands.BeginStep(number):
            yield events.StepBegan(0.0, number), None
        case commands.RunTasks(_, epoch, _, _, places):
            for worker in range(len(state.workers)):
                if worker not in call.said:
                    yield events.ShareDone(0.0, epoch, worker), worker
            told = {place: _told(call, place, state) for place in bits(places)}
            if state.settings.schedule is Schedule.FULLY_ASYNC:
                for place, words in told.items():
                    for word in words if not call.said & set(words) else ():
                        yield events.GroupClosed(0.0, epoch, place, word, 1, _EQUAL in word), word
            for words in product(*told.values()):
                equal = sum(1 << p for p, word in zip(told, words, strict=True) if _EQUAL in word)
                yield events.TasksFinished(0.0, epoch, {}, equal), None
        case commands.ActivateDrafter(_, epoch):
            if "attached" not in call.said:
                yield events.DrafterActivated(0.0, epoch), "attached"
            elif state.lease is not None and not state.lease.preempting:
                yield events.TrafficWaits(0.0, epoch, 1), "attached"
            if "promoted" not in call.said:
                yield events.GatePromoted(0.0, epoch, state.candidate[1] + 1), "promoted"
            yield events.Detached(0.0, epoch, "epochs"), None
        case commands.JoinDrafter(_, epoch, slots):
            yield events.DrafterJoined(0.0, epoch, len(slots)), None
        case commands.PreemptDrafter(_, epoch):
            yield events.Preempted(0.0, epoch), None
        case commands.TrainPolicy(_, epoch, _, version):
            if "stepped" not in call.said:
                yield events.PolicyStepped(0.0, epoch, version + 1), "stepped"
            yield events.PolicyPrepared(0.0, epoch, version + 1), None
        case commands.Commit(_, _, versions):
            yield events.Committed(0.0, versions), None
        case commands.Evaluate(_, epoch, kind):
            yield events.EvaluationDone(0.0, epoch, kind, 1.0), None
        case commands.SaveCheckpoints(_, epoch):
            yield events.CheckpointsSaved(0.0, epoch), None
        case commands.AwaitService(service):
            yield events.ServiceBack(0.0, service), None


def _told(call: Call, place: int, state: State) -> list[str]:
    """Possible words for a group: the noted words, else all words (two with dynamic sampling)."""
    words = [f"group {place}"]
    if state.settings.dynamic_sampling_rounds:
        words.append(f"{_EQUAL} group {place}")
    return [word for word in words if word in call.said] or words


def failures(call: Call) -> Iterator[Event]:
    """Ways in which a call may fail."""
    match call.command:
        case commands.RunTasks(_, epoch):
            yield events.WorkerLost(0.0, epoch, 0)
            yield events.SetDamaged(0.0, epoch)
            yield events.Deadline(0.0, epoch, "rollout", 1.0)
        case commands.ActivateDrafter(_, epoch):
            yield events.TrainerFailed(0.0, epoch, Service.DRAFTER_TRAINER, "died")
            yield events.Deadline(0.0, epoch, "activation", 1.0)
            yield events.CallFailed(0.0, Service.DRAFTER_TRAINER, "activation", "broken")
        case commands.JoinDrafter(_, epoch):
            yield events.JoinFailed(0.0, epoch, "it stops")
            yield events.Deadline(0.0, epoch, "join", 1.0)
        case commands.PreemptDrafter(_, epoch):
            yield events.Deadline(0.0, epoch, "preempt", 1.0)
        case commands.TrainPolicy(_, epoch):
            yield events.TrainerFailed(0.0, epoch, Service.POLICY_TRAINER, "died")
            yield events.CallFailed(0.0, Service.POLICY_TRAINER, "policy", "broken")
        case commands.Commit(_, epoch, versions):
            yield events.CommitFailed(0.0, versions, "not prepared")
            yield events.Deadline(0.0, epoch, "commit", 1.0)
        case commands.Evaluate(_, epoch):
            yield events.Deadline(0.0, epoch, "evaluate", 1.0)
        case commands.SaveCheckpoints(_, epoch):
            yield events.Deadline(0.0, epoch, "close", 1.0)
        case commands.AwaitService(service) if service not in OPTIONAL:
            yield events.CallFailed(0.0, service, "recovery", "away for too long")


def key(world: World) -> tuple[object, ...]:
    """A key of the world: worlds with equal keys behave equally.

    The machine only compares epochs of a track and drafters, and adds one. Worlds that differ only
    in the size of these numbers are therefore equal. The machine does not read slots' epochs and
    the sets' numbers.
    """
    state, lease, committing = world.state, world.state.lease, world.state.committing
    rollouts, learner = state.rollouts, state.learner
    called: dict[str, list[int]] = {track: [] for track in TRACK_OF.values()}
    for call in world.calls:
        if (track := TRACK_OF.get(type(call.command))) is not None:
            called[track].append(getattr(call.command, "epoch", 0))
    drawn = [draw.epoch for draw in rollouts.running]
    generating = ranks(rollouts.epoch, *drawn, *called["rollouts"])
    learning = ranks(learner.epoch, *called["learner"])
    drafting = ranks(state.lease_epoch, state.candidate[0], *called["drafter"])
    waiting = ranks(state.phase_epoch, *called["run"])
    epochs = {
        "rollouts": generating,
        "learner": learning,
        "drafter": drafting,
        "run": waiting,
    }
    drafter = ranks(
        *(state.candidate[1], state.versions.drafter, state.promoted, state.previous_drafter),
        committing and committing.drafter,
    )
    return (
        *(state.phase, waiting[state.phase_epoch], drafting[state.lease_epoch]),
        *(rollouts.phase, rollouts.step, rollouts.drawing, rollouts.attempts, rollouts.damaged),
        tuple(_draw(draw, generating) for draw in rollouts.draws),
        *(generating[rollouts.epoch], learning[learner.epoch]),
        *(learner.phase, learner.step, learner.attempts, learner.batch),
        *(drafting[state.candidate[0]], drafter[state.candidate[1]]),
        *(state.workers, tuple(slot.holder for slot in state.slots)),
        lease and (drafting[lease.epoch], lease.slots, lease.preempting, lease.attached),
        *(state.versions.policy, drafter[state.versions.drafter], drafter[state.promoted]),
        *(drafter[state.previous_drafter], state.rollback, state.prepared, state.evaluations),
        committing and (committing.policy, drafter[committing.drafter], committing.profile),
        state.versions.profile,
        *(state.drafter_benched, state.lost, state.failed_phase),
        *(state.settings.total_steps, world.faults, state.paused, world.pauses),
        tuple((str(call.kind), _rank(call, epochs), call.said) for call in world.calls),
    )


def _draw(draw: DrawnStep, epoch: dict[int | None, int | None]) -> tuple[object, ...]:
    state = (draw.called, draw.finished, draw.owed, draw.closed, draw.taken)
    state += (draw.round, draw.places)
    return (draw.step, draw.version, None if draw.finished else epoch[draw.epoch], *state)


def _rank(call: Call, epochs: dict[str, dict[int | None, int | None]]) -> int | None:
    track = TRACK_OF.get(type(call.command))
    return None if track is None else epochs[track][getattr(call.command, "epoch", 0)]


def ranks(*numbers: int | None) -> dict[int | None, int | None]:
    """Rank of each number among the given numbers; None stays None."""
    places = {one: place for place, one in enumerate(sorted({n or 0 for n in numbers}))}
    return {None: None, **places}
