"""The events of a run, as frozen dataclasses; `EVENTS` in step.py has a row for each.

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
"""Key in the details of TasksFinished for samples without a reward, by their end."""
PASSED = "figures"
"""Key in the details of EvaluationDone for the statistics of several samples per task."""


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""

    at_s: float  # wall clock, seconds


@dataclass(frozen=True, slots=True)
class CallAnswer(Event):
    """An event about a call or a lease, identified by its command's epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """The services are present; the run begins."""

    settings: RunSettings
    versions: VersionSet


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """A coordinator has taken the run over from its journal; the number of steps may have
    changed.
    """

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
    """A group of the step gets no more samples. Sent if groups are trained before their step's
    tasks have all ended.
    """

    index: int  # of its task in the step
    group_id: str
    sessions: int  # with a reward
    equal_rewards: bool = False  # all rewards are equal, so the group teaches nothing


@dataclass(frozen=True, slots=True)
class TasksFinished(CallAnswer):
    """All samples of the call ended: of the step, or of a round that stood in for some of its
    groups.
    """

    details: Details = field(default_factory=dict)
    equal_rewards: int = 0  # places of groups with equal rewards, a bit each


@dataclass(frozen=True, slots=True)
class WorkerLost(CallAnswer):
    """An engine worker died while it generated; the gateway restarts it."""

    worker: int


@dataclass(frozen=True, slots=True)
class SetDamaged(CallAnswer):
    """The serving set is damaged and its policy is lost, since the trainer is a version ahead."""


@dataclass(frozen=True, slots=True)
class WorkersReleased(CallAnswer):
    """The engine has returned the memory of the lease's slots, so the trainer may start."""

    holder: Holder
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DrafterActivated(CallAnswer):
    """The drafter trains on its slots."""

    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DrafterJoined(CallAnswer):
    """The drafter also trains on the slots that joined its lease."""

    slots: int  # all slots of the lease, in order
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JoinFailed(CallAnswer):
    """The trainer does not train on the slots that were added to its lease."""

    message: str


@dataclass(frozen=True, slots=True)
class TrafficWaits(CallAnswer):
    """Callers' requests wait because the drafter holds workers' slots."""

    requests: int


@dataclass(frozen=True, slots=True)
class GatePromoted(CallAnswer):
    """A candidate drafter beat the serving one and is prepared at the gateway."""

    drafter_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GateDecided(CallAnswer):
    """The drafter's gate made a decision without a version change: kept, refused, frozen, reopened
    or rolled_back.
    """

    decision: str
    drafter_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Preempted(CallAnswer):
    """The drafter trainer has confirmed a preemption: the slots are free."""

    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Detached(CallAnswer):
    """The activation has ended: the slots are free."""

    reason: str
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerFailed(CallAnswer):
    """A trainer lost a rank, or could not train for its own reasons."""

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
    """The optimiser step is done; the push continues without slots."""

    policy_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PathsBeyondBound(CallAnswer):
    """The trainer's audit found a larger gap to the engine's log-probs than rounding explains, with
    paths as in PolicyStepped.
    """

    paths: tuple[str, ...]
    details: Details = field(default_factory=dict)  # figures of each path


@dataclass(frozen=True, slots=True)
class PolicyPrepared(CallAnswer):
    """The new policy is prepared at the gateway, and its head at the drafter trainer if that is
    present.
    """

    policy_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Committed(Event):
    """The set serves."""

    versions: VersionSet


@dataclass(frozen=True, slots=True)
class CommitFailed(Event):
    """A part of the set is absent; the former set serves."""

    versions: VersionSet
    message: str


@dataclass(frozen=True, slots=True)
class AcceptanceFell(Event):
    """Live acceptance length with this drafter is below the previous drafter's by more than noise,
    or the drafter's files are damaged.
    """

    drafter_version: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluationDone(CallAnswer):
    """An evaluation ended; value None if the engine cannot make it."""

    kind: Evaluation
    value: float | None
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointsSaved(CallAnswer):
    """The trainers have written the final checkpoints of a run."""

    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """An operator requested the run's end after the present step."""


@dataclass(frozen=True, slots=True)
class Paused(Event):
    """An operator requested a pause after the present work."""


@dataclass(frozen=True, slots=True)
class Continued(Event):
    """An operator requested that a paused run continue."""


@dataclass(frozen=True, slots=True)
class DrafterChosen(Event):
    """An operator chose a drafter: until it is unpinned, or after a rollback for at least one step.
    Version None is the serving drafter for a pin, the previous one for a rollback.
    """

    version: int | None
    lasting: bool


@dataclass(frozen=True, slots=True)
class DrafterUnpinned(Event):
    """An operator returned the choice of the drafter to the gate."""


@dataclass(frozen=True, slots=True)
class ProfileChosen(Event):
    """An operator chose the profile of the next policies; "": no rounding."""

    profile: str


@dataclass(frozen=True, slots=True)
class WorkersRequested(Event):
    """An operator wants workers in vacant places."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrainRequested(Event):
    """An operator wants workers to leave."""

    workers: tuple[int, ...]
    drain_s: float  # that their requests have to end


@dataclass(frozen=True, slots=True)
class WorkersJoined(CallAnswer):
    """Added workers serve, the committed set from their first request on."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JoinRefused(CallAnswer):
    """Workers that were to be added do not start."""

    workers: tuple[int, ...]
    message: str


@dataclass(frozen=True, slots=True)
class WorkersLeft(CallAnswer):
    """Drained workers are gone; what they ran has ended or goes on elsewhere."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RanksRequested(Event):
    """An operator wants the policy trained on so many ranks from the next step on."""

    ranks: int


@dataclass(frozen=True, slots=True)
class RanksChanged(CallAnswer):
    """So many ranks have taken up the policy's state, and train the step that has begun."""

    ranks: int
    details: Details = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RanksKept(CallAnswer):
    """The number of ranks that was wanted did not come up: those of before train the step."""

    ranks: int
    message: str


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
