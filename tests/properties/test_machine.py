"""The machine under any events in any order: one holder a slot, growing epochs, and a run that
ends.
"""

from __future__ import annotations

from dataclasses import replace

from drawn_cases import case_count
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.settings import RunSettings
from paceline.services.coordinator.machine.slots import Holder, WorkerState, slot_row
from paceline.services.coordinator.machine.state import (
    Phase,
    Service,
    State,
)
from paceline.services.coordinator.machine.step import LIVE, step
from paceline.trajectory import VersionSet

UNNUMBERED = (
    events.Resumed,
    events.StopRequested,
    events.Paused,
    events.Continued,
    events.ServiceLost,
    events.ServiceBack,
    events.CallFailed,
)
"""Events without an epoch, a step or a set: much later they are news, not duplicates."""


def outline(state: State) -> State:
    """The state without its epochs."""
    slots = slot_row(replace(slot, epoch=0) for slot in state.slots)
    lease = state.lease and replace(state.lease, epoch=0)
    draws = tuple(replace(draw, epoch=0) for draw in state.rollouts.draws)
    rollouts = replace(state.rollouts, epoch=0, draws=draws)
    learner = replace(state.learner, epoch=0)
    return replace(
        state,
        epoch=0,
        phase_epoch=0,
        lease_epoch=0,
        slots=slots,
        lease=lease,
        rollouts=rollouts,
        learner=learner,
    )


class World(RuleBasedStateMachine):
    """Peers that answer every command some time later, or die. They see only the commands that they
    receive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = State()
        self.history: list[events.Event] = []
        self.calls: dict[str, commands.Command] = {}
        self.generating: set[int] = set()
        self.stepped = False
        self.now = 0.0
        self.candidates = 0

    @initialize(
        workers=st.integers(1, 4),
        slots_per_worker=st.integers(1, 2),
        interval=st.integers(1, 2),
        drafter_slots=st.integers(1, 4),
        evaluations=st.booleans(),
        serial=st.booleans(),
        pushing=st.booleans(),
        groups=st.integers(1, 3),
        rounds=st.integers(0, 2),
    )
    def start(
        self,
        workers: int,
        slots_per_worker: int,
        interval: int,
        drafter_slots: int,
        evaluations: bool,
        serial: bool,
        pushing: bool,
        groups: int,
        rounds: int,
    ) -> None:
        wanted = RunSettings(
            workers=workers,
            slots_per_worker=slots_per_worker,
            total_steps=3,
            training_interval_steps=interval,
            max_drafter_slots=drafter_slots,
            train_during_push=pushing,
            serial_drafter=serial,
            accuracy_enabled=evaluations,
            probe_enabled=evaluations,
            probe_every=2,
            groups_per_step=groups,
            dynamic_sampling_rounds=rounds,
        )
        self.feed(events.RunStarted(0.0, wanted, VersionSet()))

    def feed(self, event: events.Event) -> None:
        before = self.state
        self.state, issued = step(before, event)
        self.history.append(event)
        for old, new in zip(before.slots, self.state.slots, strict=False):
            assert new.epoch >= old.epoch
            if new.holder is not old.holder and new.holder is not Holder.NONE:
                assert new.epoch > old.epoch
        assert self.state.epoch >= before.epoch
        assert self.state.versions.seq >= before.versions.seq
        self.repeat(event)
        for command in issued:
            self.take(command)

    def repeat(self, event: events.Event) -> None:
        """A duplicate changes nothing; a second Resumed is another coordinator, which makes the
        call again under a new epoch.
        """
        state, issued = step(self.state, event)
        if isinstance(event, events.Resumed):
            assert outline(state) == outline(self.state)
            return
        assert state == self.state
        assert all(isinstance(command, commands.Refuse) for command in issued)

    def take(self, command: commands.Command) -> None:
        match command:
            case commands.RunTasks():
                self.generating = set(range(len(self.state.workers)))
            case commands.TrainPolicy():
                self.stepped = False
            case commands.AwaitService(service):
                self.calls[f"await {service}"] = command
                return
            case (
                commands.CloseStep()
                | commands.AbortDrafter()
                | commands.Quarantine()
                | commands.Refuse()
            ):
                return
            case _:
                pass
        self.calls[type(command).__name__] = command

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def call(self, kind: type[commands.Command]) -> commands.Command:
        return self.calls[kind.__name__]

    @invariant()
    def one_holder_a_slot(self) -> None:
        state = self.state
        leased = set(state.lease.slots) if state.lease else set()
        assert {i for i, slot in enumerate(state.slots) if slot.holder is Holder.DRAFTER} == leased
        for worker, worker_state in enumerate(state.workers):
            holders = {state.slots[slot].holder for slot in state.settings.worker_slots(worker)}
            assert len(holders) == 1
            assert (worker_state is WorkerState.TRAINING) == (holders == {Holder.DRAFTER})
            if worker_state is WorkerState.GENERATING and Phase.ROLLOUT in state.phases:
                assert holders == {Holder.ENGINE}
        alone = {Phase.EVALUATE, Phase.PAUSED, Phase.CLOSING}
        if state.phases & alone or state.slots.counted(Holder.POLICY):
            assert state.lease is None
        if state.phases & {Phase.POLICY, Phase.COMMIT} and state.lease is not None:
            assert state.settings.train_during_push
            assert state.lease.preempting or state.committing is None

    @precondition(lambda self: "BeginStep" in self.calls and self.state.rollouts.drawing)
    @rule()
    def begin(self) -> None:
        command = self.calls.pop("BeginStep")
        assert isinstance(command, commands.BeginStep)
        self.feed(events.StepBegan(self.tick(), command.step))

    @precondition(lambda self: "RunTasks" in self.calls and len(self.generating) > 1)
    @rule(choice=st.integers(0, 99))
    def share_done(self, choice: int) -> None:
        worker = sorted(self.generating)[choice % len(self.generating)]
        self.generating.discard(worker)
        command = self.call(commands.RunTasks)
        assert isinstance(command, commands.RunTasks)
        self.feed(events.ShareDone(self.tick(), command.epoch, worker))

    @precondition(lambda self: "RunTasks" in self.calls)
    @rule(equal=st.integers(0, 7))
    def tasks_finished(self, equal: int) -> None:
        command = self.calls.pop("RunTasks")
        assert isinstance(command, commands.RunTasks)
        equal &= command.places
        self.feed(events.TasksFinished(self.tick(), command.epoch, {}, equal))

    @precondition(lambda self: "RunTasks" in self.calls)
    @rule()
    def worker_lost(self) -> None:
        command = self.calls.pop("RunTasks")
        assert isinstance(command, commands.RunTasks)
        self.feed(events.WorkerLost(self.tick(), command.epoch, 0))

    @precondition(lambda self: "ActivateDrafter" in self.calls)
    @rule(
        ending=st.sampled_from(
            ["released", "activated", "promoted", "epochs", "rank_lost", "deadline"]
        )
    )
    def drafter_news(self, ending: str) -> None:
        command = self.call(commands.ActivateDrafter)
        assert isinstance(command, commands.ActivateDrafter)
        epoch, now = command.epoch, self.tick()
        match ending:
            case "released":
                self.feed(events.WorkersReleased(now, epoch, Holder.DRAFTER))
            case "activated":
                self.feed(events.DrafterActivated(now, epoch))
            case "promoted":
                self.candidates += 1
                self.feed(events.GatePromoted(now, epoch, self.candidates))
            case "deadline":
                self.feed(events.Deadline(now, epoch, "activation", 30.0))
            case "rank_lost":
                del self.calls["ActivateDrafter"]
                self.feed(events.TrainerFailed(now, epoch, Service.DRAFTER_TRAINER, "died"))
            case _:
                del self.calls["ActivateDrafter"]
                self.feed(events.Detached(now, epoch, ending))

    @precondition(lambda self: "JoinDrafter" in self.calls)
    @rule(ending=st.sampled_from(["joined", "failed", "deadline"]))
    def join_news(self, ending: str) -> None:
        command = self.calls.pop("JoinDrafter")
        assert isinstance(command, commands.JoinDrafter)
        epoch, now = command.epoch, self.tick()
        match ending:
            case "joined":
                self.feed(events.DrafterJoined(now, epoch, len(command.slots)))
            case "failed":
                self.feed(events.JoinFailed(now, epoch, "it stops"))
            case _:
                self.feed(events.Deadline(now, epoch, "join", 30.0))

    @precondition(lambda self: "PreemptDrafter" in self.calls)
    @rule(answered=st.booleans(), detached_first=st.booleans())
    def preempted(self, answered: bool, detached_first: bool) -> None:
        command = self.calls.pop("PreemptDrafter")
        assert isinstance(command, commands.PreemptDrafter)
        self.calls.pop("ActivateDrafter", None)
        if not answered:
            self.feed(events.Deadline(self.tick(), command.epoch, "preempt", 4.0))
            return
        if detached_first:
            self.feed(events.Detached(self.tick(), command.epoch, "preempted"))
        self.feed(events.Preempted(self.tick(), command.epoch))

    @precondition(lambda self: "TrainPolicy" in self.calls)
    @rule(lost=st.booleans(), inexact=st.sampled_from(["", "", "reused", "arm=eagle:3_1_4"]))
    def policy_news(self, lost: bool, inexact: str = "") -> None:
        command = self.call(commands.TrainPolicy)
        assert isinstance(command, commands.TrainPolicy)
        self.feed(events.WorkersReleased(self.tick(), command.epoch, Holder.POLICY))
        if lost:
            del self.calls["TrainPolicy"]
            self.feed(
                events.TrainerFailed(self.tick(), command.epoch, Service.POLICY_TRAINER, "died")
            )
        elif inexact and self.stepped:
            known = self.state.quarantined
            self.feed(events.PathsBeyondBound(self.tick(), command.epoch, (inexact, inexact)))
            assert self.state.quarantined == tuple(dict.fromkeys((*known, inexact)))
        elif not self.stepped:
            self.stepped = True
            self.feed(events.PolicyStepped(self.tick(), command.epoch, command.policy_version + 1))
        else:
            del self.calls["TrainPolicy"]
            self.feed(events.PolicyPrepared(self.tick(), command.epoch, command.policy_version + 1))

    @precondition(lambda self: "Commit" in self.calls)
    @rule(succeeded=st.booleans(), fell=st.booleans())
    def commit_news(self, succeeded: bool, fell: bool) -> None:
        command = self.calls.pop("Commit")
        assert isinstance(command, commands.Commit)
        if fell:
            self.feed(events.AcceptanceFell(self.tick(), self.state.versions.drafter))
        if succeeded:
            self.feed(events.Committed(self.tick(), command.versions))
        else:
            self.feed(events.CommitFailed(self.tick(), command.versions, "not prepared"))

    @precondition(lambda self: "Evaluate" in self.calls)
    @rule()
    def evaluated(self) -> None:
        command = self.calls.pop("Evaluate")
        assert isinstance(command, commands.Evaluate)
        self.feed(events.EvaluationDone(self.tick(), command.epoch, command.kind, 1.0))

    @precondition(lambda self: "SaveCheckpoints" in self.calls)
    @rule()
    def saved(self) -> None:
        command = self.calls.pop("SaveCheckpoints")
        assert isinstance(command, commands.SaveCheckpoints)
        self.feed(events.CheckpointsSaved(self.tick(), command.epoch))

    @precondition(lambda self: self.state.phase in LIVE)
    @rule(service=st.sampled_from(list(Service)))
    def service_lost(self, service: Service) -> None:
        dead = {
            Service.GATEWAY: ["RunTasks", "Commit", "Evaluate"],
            Service.POLICY_TRAINER: ["TrainPolicy", "SaveCheckpoints"],
            Service.DRAFTER_TRAINER: ["ActivateDrafter", "JoinDrafter", "PreemptDrafter"],
        }[service]
        for kind in dead:
            self.calls.pop(kind, None)
        self.feed(events.ServiceLost(self.tick(), service, "connection refused"))

    @precondition(lambda self: self.state.phase in LIVE)
    @rule()
    def a_call_of_the_drafter_trainer_fails(self) -> None:
        before = self.state.phase
        for kind in ("ActivateDrafter", "JoinDrafter", "PreemptDrafter"):
            self.calls.pop(kind, None)
        self.feed(events.CallFailed(self.tick(), Service.DRAFTER_TRAINER, "any", "broken"))
        assert self.state.phase is not Phase.FAILED or before is Phase.FAILED

    @precondition(lambda self: self.state.phase in LIVE and self.state.step == 2)
    @rule()
    def stop_requested(self) -> None:
        self.feed(events.StopRequested(self.tick()))

    @precondition(lambda self: self.state.phase in LIVE)
    @rule(paused=st.booleans())
    def an_operator_pauses_or_goes_on(self, paused: bool) -> None:
        self.feed((events.Paused if paused else events.Continued)(self.tick()))

    @precondition(lambda self: any(name.startswith("await") for name in self.calls))
    @rule()
    def service_back(self) -> None:
        name = next(name for name in self.calls if name.startswith("await"))
        command = self.calls.pop(name)
        assert isinstance(command, commands.AwaitService)
        self.feed(events.ServiceBack(self.tick(), command.service))

    @precondition(lambda self: self.state.phase is not Phase.NEW)
    @rule()
    def coordinator_restarted(self) -> None:
        self.calls.clear()
        self.feed(events.Resumed(self.tick(), 3))

    @rule(choice=st.integers(0, 999))
    def an_old_event_that_comes_again_changes_nothing(self, choice: int) -> None:
        old = [event for event in self.history if not isinstance(event, UNNUMBERED)]
        if old:
            self.repeat(old[choice % len(old)])

    def teardown(self) -> None:
        """From here on every peer answers: the run ends."""
        if self.state.phase is Phase.NEW:
            return
        fair = [
            (lambda: any(name.startswith("await") for name in self.calls), self.service_back),
            (lambda: "PreemptDrafter" in self.calls, lambda: self.preempted(True, False)),
            (lambda: "BeginStep" in self.calls and self.state.rollouts.drawing, self.begin),
            (
                lambda: "RunTasks" in self.calls and len(self.generating) > 1,
                lambda: self.share_done(0),
            ),
            (lambda: "RunTasks" in self.calls, lambda: self.tasks_finished(7)),
            (lambda: "TrainPolicy" in self.calls, lambda: self.policy_news(False)),
            (
                lambda: "ActivateDrafter" in self.calls and Phase.DRAFTER in self.state.phases,
                lambda: self.drafter_news("epochs"),
            ),
            (lambda: "Commit" in self.calls, lambda: self.commit_news(True, False)),
            (lambda: "Evaluate" in self.calls, self.evaluated),
            (lambda: "SaveCheckpoints" in self.calls, self.saved),
            (
                lambda: self.state.phase is Phase.PAUSED,
                lambda: self.an_operator_pauses_or_goes_on(False),
            ),
        ]
        for _ in range(200):
            if self.state.phase in (Phase.FINISHED, Phase.FAILED):
                break
            next(act for ready, act in fair if ready())()
            self.one_holder_a_slot()
        assert self.state.phase in (Phase.FINISHED, Phase.FAILED)
        assert (
            all(slot.holder is not Holder.DRAFTER for slot in self.state.slots)
            or self.state.phase is Phase.FAILED
        )
        replayed = State()
        for event in self.history:
            replayed = step(replayed, event)[0]
        assert replayed == self.state


World.TestCase.settings = hypothesis_settings(
    max_examples=case_count(150), stateful_step_count=40, deadline=None, derandomize=True
)
TestWorld = World.TestCase
