"""What can happen to a run, as frozen dataclasses. Owns no meaning (machine.py) and no wire format
(codec.py).

Every event carries `at_s`, the wall clock in seconds at which it happened, and where it answers a
command the epoch of that command. `details` are figures for the step's record; the machine does not
read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.machine.state import Evaluation, Service, Settings, Versions

Figure = float | int | str | Mapping[str, float | int] | tuple[int, ...] | tuple[float, ...] | None
Details = Mapping[str, Figure]


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The peers are there; the run begins."""

    at_s: float
    settings: Settings
    versions: Versions


@dataclass(frozen=True, slots=True)
class Resumed:
    """A coordinator took the run over from its journal; the number of steps may have changed."""

    at_s: float
    total_steps: int


@dataclass(frozen=True, slots=True)
class StepBegan:
    """The tasks of the step are drawn."""

    at_s: float
    step: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class ShareDone:
    """A worker has finished its share of the step."""

    at_s: float
    epoch: int
    worker: int


@dataclass(frozen=True, slots=True)
class TasksFinished:
    """All samples of the step ended."""

    at_s: float
    epoch: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """An engine worker died while it generated; the gateway restarts it."""

    at_s: float
    epoch: int
    worker: int


@dataclass(frozen=True, slots=True)
class DrafterActivated:
    """The drafter trains on its slots."""

    at_s: float
    epoch: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GatePromoted:
    """A candidate drafter beat the serving one and is prepared at the gateway."""

    at_s: float
    epoch: int
    drafter_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GateDecided:
    """The drafter's gate decided something that changes no version: kept, refused, frozen, reopened
    or rolled_back.
    """

    at_s: float
    epoch: int
    decision: str
    drafter_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Preempted:
    """The drafter trainer confirmed a preemption: the slots are free."""

    at_s: float
    epoch: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Detached:
    """The activation's last word: the slots are free."""

    at_s: float
    epoch: int
    reason: str
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankLost:
    """A trainer lost a rank, or could not train for a reason of its own."""

    at_s: float
    epoch: int
    service: Service
    message: str


@dataclass(frozen=True, slots=True)
class Deadline:
    """A wait ended without its event: "activation", "preempt", "rollout", "policy", "commit",
    "evaluate", "close".
    """

    at_s: float
    epoch: int
    what: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PolicyStepped:
    """The optimiser step is done; the push goes on without slots."""

    at_s: float
    epoch: int
    policy_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PolicyPrepared:
    """The new policy is prepared at the gateway and its head at the drafter trainer."""

    at_s: float
    epoch: int
    policy_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Committed:
    """The set serves."""

    at_s: float
    versions: Versions


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """A part of the set is not there; the former set serves."""

    at_s: float
    versions: Versions
    message: str


@dataclass(frozen=True, slots=True)
class AcceptanceFell:
    """Live acceptance length since this drafter serves is below the one before by more than noise
    allows.
    """

    at_s: float
    drafter_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """An evaluation ended; value None when the engine cannot make it."""

    at_s: float
    epoch: int
    kind: Evaluation
    value: float | None
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointsSaved:
    """The trainers wrote the checkpoints that end a run."""

    at_s: float
    epoch: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody asked for the run to end with the running step."""

    at_s: float


@dataclass(frozen=True, slots=True)
class ServiceLost:
    """A call failed because its peer is not there."""

    at_s: float
    service: Service
    message: str


@dataclass(frozen=True, slots=True)
class ServiceBack:
    """The peer serves again."""

    at_s: float
    service: Service


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call failed in a way that no repetition cures."""

    at_s: float
    service: Service
    call: str
    message: str


Event = (
    RunStarted
    | Resumed
    | StepBegan
    | ShareDone
    | TasksFinished
    | WorkerLost
    | DrafterActivated
    | GatePromoted
    | GateDecided
    | Preempted
    | Detached
    | RankLost
    | Deadline
    | PolicyStepped
    | PolicyPrepared
    | Committed
    | CommitFailed
    | AcceptanceFell
    | EvaluationDone
    | CheckpointsSaved
    | StopRequested
    | ServiceLost
    | ServiceBack
    | CallFailed
)
