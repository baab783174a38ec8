"""Names what can happen to a run, as frozen dataclasses; `EVENTS` in step.py has a row for each.

`details` are figures for the step's record; the machine does not read them. The journal writes
every field by its annotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.services.coordinator.machine.settings import RunSettings
from paceline.services.coordinator.machine.slots import Holder
from paceline.services.coordinator.machine.state import Evaluation, Service
from paceline.trajectory import VersionSet

Figure = float | int | str | Mapping[str, float | int] | tuple[float | int, ...] | None
Details = Mapping[str, Figure]
UNSCORED = "samples_unscored"
"""Where the details of TasksFinished have the samples without a reward, by the way they ended."""
PASSED = "figures"
"""Where the details of EvaluationDone have what an evaluation of several samples a task tells."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    at_s: float  # wall clock, seconds


@dataclass(frozen=True, slots=True)
class CallAnswer(Event):
    """News of a call or a lease, which it names by its command's epoch."""

    epoch: int


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
class ShareDone(CallAnswer):
    """A worker has finished its share of the step."""

    worker: int


@dataclass(frozen=True, slots=True)
class GroupClosed(CallAnswer):
    """A group of the step gets no more samples; told where groups are trained before their step's
    tasks have all ended.
    """

    index: int  # of its task in the step
    group_id: str
    sessions: int  # that ended scored
    equal_rewards: bool = False  # of all of them: they teach nothing


@dataclass(frozen=True, slots=True)
class TasksFinished(CallAnswer):
    """All samples of the call ended: of the step, or of a round that stood in for some of its
    groups.
    """

    details: Details = field(default_factory=dict)
    equal_rewards: int = 0  # places of groups whose rewards are all equal, a bit each


@dataclass(frozen=True, slots=True)
class WorkerLost(CallAnswer):
    """An engine worker died while it generated; the gateway restarts it."""

    worker: int


@dataclass(frozen=True, slots=True)
class SetDamaged(CallAnswer):
    """The set to roll out with is damaged, and its policy is gone: the trainer has trained on."""


@dataclass(frozen=True, slots=True)
class WorkersReleased(CallAnswer):
    """The engine has given the memory of the lease's slots back: now the trainer is told of it."""

    holder: Holder
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DrafterActivated(CallAnswer):
    """The drafter trains on its slots."""

    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DrafterJoined(CallAnswer):
    """The drafter trains on the slots that were added to its lease, too."""

    slots: int  # of the lease, from its first on
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JoinFailed(CallAnswer):
    """Slots were added to the drafter's lease, and its trainer does not train on them."""

    message: str


@dataclass(frozen=True, slots=True)
class TrafficWaits(CallAnswer):
    """Requests of callers wait because the drafter has workers' slots."""

    requests: int


@dataclass(frozen=True, slots=True)
class GatePromoted(CallAnswer):
    """A candidate drafter beat the serving one and is prepared at the gateway."""

    drafter_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GateDecided(CallAnswer):
    """The drafter's gate decided something that changes no version: kept, refused, frozen, reopened
    or rolled_back.
    """

    decision: str
    drafter_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Preempted(CallAnswer):
    """The drafter trainer confirmed a preemption: the slots are free."""

    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Detached(CallAnswer):
    """The activation's last word: the slots are free."""

    reason: str
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerFailed(CallAnswer):
    """A trainer lost a rank, or could not train for a reason of its own."""

    service: Service
    message: str


@dataclass(frozen=True, slots=True)
class Deadline(CallAnswer):
    """A wait ended without its event: "activation", "join" or "preempt" of a lease; "rollout",
    "policy", "commit", "evaluate" or "close" of a phase's call.
    """

    what: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PolicyStepped(CallAnswer):
    """The optimiser step is done; the push goes on without slots."""

    policy_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PathsBeyondBound(CallAnswer):
    """The trainer's audit found log-probs of the engine further from its own than rounding
    explains: paths as PolicyStepped names them.
    """

    paths: tuple[str, ...]
    details: Details = field(default_factory=dict)  # figures of each


@dataclass(frozen=True, slots=True)
class PolicyPrepared(CallAnswer):
    """The new policy is prepared at the gateway, and its head at the drafter trainer if that is
    there.
    """

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
    allows, or its files are damaged.
    """

    drafter_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluationDone(CallAnswer):
    """An evaluation ended; value None when the engine cannot make it."""

    kind: Evaluation
    value: float | None
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointsSaved(CallAnswer):
    """The trainers wrote the checkpoints that end a run."""

    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """Somebody asked for the run to end with the running step."""


@dataclass(frozen=True, slots=True)
class Paused(Event):
    """An operator wants the run to rest when what is under way has ended."""


@dataclass(frozen=True, slots=True)
class Continued(Event):
    """An operator wants a paused run to go on."""


@dataclass(frozen=True, slots=True)
class DrafterChosen(Event):
    """An operator wants a drafter to serve: until it is unpinned, or, after a rollback, for a step
    at least. Version None is the serving one for a pin, the one before for a rollback.
    """

    version: int | None
    lasting: bool


@dataclass(frozen=True, slots=True)
class DrafterUnpinned(Event):
    """An operator leaves it to the gate again which drafter serves."""


@dataclass(frozen=True, slots=True)
class ProfileChosen(Event):
    """An operator wants policies to be rounded to a profile from the next one on; "": to none."""

    profile: str


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
