"""Names what can happen to a run, as frozen dataclasses; `EVENTS` in step.py has a row for each.

Where an event answers a command it carries the epoch of that command. `details` are figures for the
step's record; the machine does not read them. The journal writes every field by its annotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.machine.state import Evaluation, RunSettings, Service
from paceline.trajectory import VersionSet

Figure = float | int | str | Mapping[str, float | int] | tuple[float | int, ...] | None
Details = Mapping[str, Figure]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    at_s: float  # wall clock, seconds


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """The peers are there; the run begins."""

    settings: RunSettings
    versions: VersionSet


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """A coordinator took the run over from its journal; the number of steps may have changed."""

    total_steps: int


@dataclass(frozen=True, slots=True)
class StepBegan(Event):
    """The tasks of the step are drawn."""

    step: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class ShareDone(Event):
    """A worker has finished its share of the step."""

    epoch: int
    worker: int


@dataclass(frozen=True, slots=True)
class TasksFinished(Event):
    """All samples of the step ended."""

    epoch: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerLost(Event):
    """An engine worker died while it generated; the gateway restarts it."""

    epoch: int
    worker: int


@dataclass(frozen=True, slots=True)
class DrafterActivated(Event):
    """The drafter trains on its slots."""

    epoch: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GatePromoted(Event):
    """A candidate drafter beat the serving one and is prepared at the gateway."""

    epoch: int
    drafter_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GateDecided(Event):
    """The drafter's gate decided something that changes no version: kept, refused, frozen, reopened
    or rolled_back.
    """

    epoch: int
    decision: str
    drafter_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """The drafter trainer confirmed a preemption: the slots are free."""

    epoch: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Detached(Event):
    """The activation's last word: the slots are free."""

    epoch: int
    reason: str
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerFailed(Event):
    """A trainer lost a rank, or could not train for a reason of its own."""

    epoch: int
    service: Service
    message: str


@dataclass(frozen=True, slots=True)
class Deadline(Event):
    """A wait ended without its event: "activation" or "preempt" of a lease; "rollout", "policy",
    "commit", "evaluate" or "close" of a phase's call.
    """

    epoch: int
    what: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PolicyStepped(Event):
    """The optimiser step is done; the push goes on without slots."""

    epoch: int
    policy_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PolicyPrepared(Event):
    """The new policy is prepared at the gateway and its head at the drafter trainer."""

    epoch: int
    policy_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Committed(Event):
    """The set serves."""

    versions: VersionSet


@dataclass(frozen=True, slots=True)
class CommitFailed(Event):
    """A part of the set is not there; the former set serves."""

    versions: VersionSet
    message: str


@dataclass(frozen=True, slots=True)
class AcceptanceFell(Event):
    """Live acceptance length since this drafter serves is below the one before by more than noise
    allows.
    """

    drafter_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluationDone(Event):
    """An evaluation ended; value None when the engine cannot make it."""

    epoch: int
    kind: Evaluation
    value: float | None
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointsSaved(Event):
    """The trainers wrote the checkpoints that end a run."""

    epoch: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """Somebody asked for the run to end with the running step."""


@dataclass(frozen=True, slots=True)
class ServiceLost(Event):
    """A call failed because its peer is not there."""

    service: Service
    message: str


@dataclass(frozen=True, slots=True)
class ServiceBack(Event):
    """The peer serves again."""

    service: Service


@dataclass(frozen=True, slots=True)
class CallFailed(Event):
    """A call failed in a way that no repetition cures."""

    service: Service
    call: str
    message: str
