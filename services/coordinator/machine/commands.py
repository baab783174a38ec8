"""Names what the machine wants done, as frozen dataclasses.

Commands are idempotent: the receiver knows them by step, epoch or version, so a restart may issue
them again.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.machine.state import Evaluation, Service
from paceline.trajectory import VersionSet


@dataclass(frozen=True, slots=True)
class BeginStep:
    """Draw the tasks of a step; answered by StepBegan."""

    step: int


@dataclass(frozen=True, slots=True)
class RunTasks:
    """Roll the step out; answered by ShareDone and TasksFinished."""

    step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class ActivateDrafter:
    """Train the drafter on leased slots; answered by DrafterActivated, GatePromoted and
    Detached.
    """

    step: int
    epoch: int
    slots: tuple[int, ...]
    deadline_s: float
    versions: VersionSet


@dataclass(frozen=True, slots=True)
class PreemptDrafter:
    """Get the slots back; answered by Preempted, or by Deadline when nobody answers."""

    step: int
    epoch: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class TrainPolicy:
    """One optimiser step; answered by PolicyStepped and PolicyPrepared."""

    step: int
    epoch: int
    slots: tuple[int, ...]
    policy_version: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Serve a set; answered by Committed or CommitFailed."""

    step: int
    epoch: int
    versions: VersionSet


@dataclass(frozen=True, slots=True)
class AbortDrafter:
    """Forget a prepared drafter that will not serve; not answered."""

    step: int
    epoch: int
    drafter_version: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Make an evaluation outside the timed step; answered by EvaluationDone."""

    kind: Evaluation
    step: int  # steps finished before it
    epoch: int


@dataclass(frozen=True, slots=True)
class CloseStep:
    """The step's policy serves: write its record."""

    step: int


@dataclass(frozen=True, slots=True)
class SaveCheckpoints:
    """Write the trainers' checkpoints; answered by CheckpointsSaved."""

    step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class AwaitService:
    """Wait until a peer serves again; answered by ServiceBack or CallFailed."""

    service: Service


@dataclass(frozen=True, slots=True)
class FinishRun:
    """Nothing more to do; `failure` is empty on success."""

    failure: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """A late event of an old lease, set or call had no effect."""

    event: str
    seen: int
    current: int


Command = (
    BeginStep
    | RunTasks
    | ActivateDrafter
    | PreemptDrafter
    | TrainPolicy
    | Commit
    | AbortDrafter
    | Evaluate
    | CloseStep
    | SaveCheckpoints
    | AwaitService
    | FinishRun
    | Refuse
)
