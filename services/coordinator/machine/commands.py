"""Names what the machine wants done, as frozen dataclasses.

Commands are idempotent: the receiver knows them by step, epoch or version, so a restart may issue
them again.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.services.coordinator.machine.state import Evaluation, Portion, Service
from paceline.trajectory import VersionSet


@dataclass(frozen=True, slots=True)
class Command:
    """Something to be done."""


@dataclass(frozen=True, slots=True)
class StepCommand(Command):
    """A call of a step; its answers carry the epoch, and receivers refuse older ones."""

    step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class BeginStep(Command):
    """Draw the tasks of a step; answered by StepBegan."""

    step: int


@dataclass(frozen=True, slots=True)
class RunTasks(StepCommand):
    """Roll the step out with a set, or a newer one; answered by GroupClosed, ShareDone and
    TasksFinished.
    """

    versions: VersionSet
    round: int = 0  # as of DrawnStep
    places: int = 0
    capture: bool = True  # rows for the drafter


@dataclass(frozen=True, slots=True)
class ResumeWorkers(StepCommand):
    """Have lent and suspended workers serve, and go on with the requests that they hold; only a
    failure is answered.
    """


@dataclass(frozen=True, slots=True)
class ActivateDrafter(StepCommand):
    """Train the drafter on leased slots; answered by DrafterActivated, GatePromoted and
    Detached.
    """

    slots: tuple[int, ...]
    deadline_s: float
    versions: VersionSet


@dataclass(frozen=True, slots=True)
class JoinDrafter(StepCommand):
    """Have the running activation train on more slots; answered by DrafterJoined or JoinFailed."""

    slots: tuple[int, ...]  # of the lease from now on, the newest last
    joining: tuple[int, ...]  # which of them are new
    deadline_s: float


@dataclass(frozen=True, slots=True)
class PreemptDrafter(StepCommand):
    """Get the slots back; answered by Preempted, or by Deadline when nobody answers."""

    deadline_s: float


@dataclass(frozen=True, slots=True)
class TrainPolicy(StepCommand):
    """One optimiser step; answered by PolicyStepped and PolicyPrepared."""

    slots: tuple[int, ...]
    policy_version: int
    batch: tuple[Portion, ...]


@dataclass(frozen=True, slots=True)
class Quarantine(StepCommand):
    """Have the engine go without these paths; not answered, and said again before each rollout."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Commit(StepCommand):
    """Serve a set; answered by Committed or CommitFailed."""

    versions: VersionSet
    leased: tuple[int, ...] = ()  # workers whose slots the drafter has


@dataclass(frozen=True, slots=True)
class AbortDrafter(StepCommand):
    """Forget a prepared drafter that will not serve; not answered."""

    drafter_version: int


@dataclass(frozen=True, slots=True)
class Evaluate(StepCommand):
    """Make an evaluation of a set after `step` finished steps; answered by EvaluationDone."""

    kind: Evaluation
    versions: VersionSet


@dataclass(frozen=True, slots=True)
class CloseStep(Command):
    """The step's policy serves: write its record."""

    step: int


@dataclass(frozen=True, slots=True)
class SaveCheckpoints(StepCommand):
    """Write the trainers' checkpoints; answered by CheckpointsSaved."""


@dataclass(frozen=True, slots=True)
class AwaitService(Command):
    """Wait until a peer serves again; answered by ServiceBack, or by CallFailed where the run needs
    it.
    """

    service: Service


@dataclass(frozen=True, slots=True)
class HandBack(StepCommand):
    """After a failure: trainers leave their slots, the engine takes them; not answered."""

    drafter_epoch: int  # of the lease that has not ended; 0: none
    policy: bool  # it may still train


@dataclass(frozen=True, slots=True)
class FinishRun(Command):
    """Nothing more to do; `failure` is empty on success."""

    failure: str


@dataclass(frozen=True, slots=True)
class Refuse(Command):
    """A late event of an old lease, set or call had no effect."""

    event: str
    seen: int
    current: int
