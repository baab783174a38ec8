"""The events of a run, as frozen dataclasses; `EVENTS` in step.py has a row for each.

`details` are figures for the step's record; the machine does not read them. The journal writes
every field by its annotation.
"""

from collections.abc import Mapping
from dataclasses import field

from paceline.services.coordinator.machine.settings import Frozen, RunSettings
from paceline.services.coordinator.machine.slots import Holder
from paceline.services.coordinator.machine.state import Evaluation, Service
from paceline.trajectory import VersionSet

Figure = float | int | str | Mapping[str, float | int] | tuple[float | int, ...] | None
Details = Mapping[str, Figure]
UNSCORED = "samples_unscored"
"""Key in the details of TasksFinished for samples without a reward, by their end."""
PASSED = "figures"
"""Key in the details of EvaluationDone for the statistics of several samples per task."""


class Event(Frozen):
    """Base of all events."""

    at_s: float  # wall clock, seconds


class CallAnswer(Event):
    """An event about a call or a lease, identified by its command's epoch."""

    epoch: int


class RunStarted(Event):
    """The services are up; the run begins."""

    settings: RunSettings
    versions: VersionSet


class Resumed(Event):
    """A coordinator resumed the run from its journal, perhaps with another number of steps."""

    total_steps: int


class StepBegan(Event):
    """The step's tasks are drawn."""

    step: int
    traceparent: str = ""


class ShareDone(CallAnswer):
    """A worker finished its share of the step."""

    worker: int


class GroupClosed(CallAnswer):
    """A group of the step is complete; sent only if groups are trained before their step's last
    task.
    """

    index: int  # of its task in the step
    group_id: str
    sessions: int  # with a reward
    equal_rewards: bool = False  # all rewards are equal, so the group teaches nothing


class TasksFinished(CallAnswer):
    """All samples of a call ended: the step's samples, or a round of replacement groups."""

    details: Details = field(default_factory=dict)
    equal_rewards: int = 0  # places of groups with equal rewards, a bit each


class WorkerLost(CallAnswer):
    """An engine worker died while generating; the gateway restarts it."""

    worker: int


class SetDamaged(CallAnswer):
    """The rollouts' version set is damaged and its policy is gone, because the trainer has moved
    on.
    """


class WorkersReleased(CallAnswer):
    """The engine freed the memory of the lease's slots, and the trainer is notified."""

    holder: Holder
    details: Details = field(default_factory=dict)


class DrafterActivated(CallAnswer):
    """The drafter trains on its slots."""

    details: Details = field(default_factory=dict)


class DrafterJoined(CallAnswer):
    """The drafter also trains on the slots added to its lease."""

    slots: int  # all slots of the lease, in order
    details: Details = field(default_factory=dict)


class JoinFailed(CallAnswer):
    """The trainer failed to use slots added to the drafter's lease."""

    message: str


class TrafficWaits(CallAnswer):
    """Callers' requests wait because the drafter holds workers' slots."""

    requests: int


class GatePromoted(CallAnswer):
    """A candidate drafter beat the serving drafter and is prepared at the gateway."""

    drafter_version: int
    details: Details = field(default_factory=dict)


class GateDecided(CallAnswer):
    """The gate made a decision without a new version: kept, refused, frozen, reopened or
    rolled_back.
    """

    decision: str
    drafter_version: int
    details: Details = field(default_factory=dict)


class Preempted(CallAnswer):
    """The drafter trainer has confirmed a preemption: the slots are free."""

    details: Details = field(default_factory=dict)


class Detached(CallAnswer):
    """An activation ended: the slots are free."""

    reason: str
    details: Details = field(default_factory=dict)


class TrainerFailed(CallAnswer):
    """A trainer lost a rank or failed to train."""

    service: Service
    message: str


class Deadline(CallAnswer):
    """A wait ended without its event: "activation", "join" or "preempt" of a lease; "rollout",
    "policy", "commit", "evaluate" or "close" of a phase.
    """

    what: str
    seconds: float


class PolicyStepped(CallAnswer):
    """The optimiser step is done; the push continues without slots."""

    policy_version: int
    details: Details = field(default_factory=dict)


class PathsBeyondBound(CallAnswer):
    """The audit found log-probs beyond rounding; paths have the names of PolicyStepped."""

    paths: tuple[str, ...]
    details: Details = field(default_factory=dict)  # figures of each path


class PolicyPrepared(CallAnswer):
    """The new policy is prepared at the gateway, and its head at a running drafter trainer."""

    policy_version: int
    details: Details = field(default_factory=dict)


class Committed(Event):
    """The version set serves."""

    versions: VersionSet


class CommitFailed(Event):
    """A part of the version set is missing; the former set serves."""

    versions: VersionSet
    message: str


class AcceptanceFell(Event):
    """The serving drafter's live acceptance length is significantly below its predecessor's, or its
    files are damaged.
    """

    drafter_version: int
    details: Details = field(default_factory=dict)


class EvaluationDone(CallAnswer):
    """An evaluation ended; the value is None if the engine cannot make it."""

    kind: Evaluation
    value: float | None
    details: Details = field(default_factory=dict)


class CheckpointsSaved(CallAnswer):
    """The trainers wrote the run's final checkpoints."""

    details: Details = field(default_factory=dict)


class StopRequested(Event):
    """An operator ends the run after the running step."""


class Paused(Event):
    """An operator pauses the run after the steps in progress."""


class Continued(Event):
    """An operator continues a paused run."""


class ServiceLost(Event):
    """A call failed because its service is down."""

    service: Service
    message: str


class ServiceBack(Event):
    """The service is up again."""

    service: Service


class CallFailed(Event):
    """A call failed permanently."""

    service: Service
    call: str
    message: str
