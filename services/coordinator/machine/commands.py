"""The machine's commands and decisions, as frozen dataclasses.

Commands are idempotent: receivers identify them by step, epoch or version, so a restart may issue
them again.
"""

from typing import NamedTuple

from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.settings import Frozen
from paceline.services.coordinator.machine.state import Evaluation, Phase, Portion, Service, State
from paceline.trajectory import VersionSet


class Command(Frozen):
    """An action for a service or the coordinator itself."""


class StepCommand(Command):
    """A call of a step. Its answers carry the epoch, and receivers refuse older epochs."""

    step: int
    epoch: int


class BeginStep(Command):
    """Draw the tasks of a step; answered by StepBegan."""

    step: int


class RunTasks(StepCommand):
    """Roll the step out with this set or a newer one; answered by GroupClosed, ShareDone and
    TasksFinished.
    """

    versions: VersionSet
    round: int = 0  # see DrawnStep
    places: int = 0
    capture: bool = True  # rows for the drafter


class ResumeWorkers(StepCommand):
    """Make lent and suspended workers serve and continue their held requests; only a failure is
    answered.
    """


class ActivateDrafter(StepCommand):
    """Train the drafter on leased slots; answered by DrafterActivated, GatePromoted and
    Detached.
    """

    slots: tuple[int, ...]
    versions: VersionSet


class JoinDrafter(StepCommand):
    """Extend the running activation to more slots; answered by DrafterJoined or JoinFailed."""

    slots: tuple[int, ...]  # all slots of the lease, the newest last
    joining: tuple[int, ...]  # the newly added slots


class PreemptDrafter(StepCommand):
    """Take the slots back; answered by Preempted, or by Deadline without an answer."""


class TrainPolicy(StepCommand):
    """One optimiser step; answered by PolicyStepped and PolicyPrepared."""

    slots: tuple[int, ...]
    policy_version: int
    batch: tuple[Portion, ...]


class Quarantine(StepCommand):
    """Stop the engine from using these paths; not answered, and repeated before each rollout."""

    paths: tuple[str, ...]


class Commit(StepCommand):
    """Serve a set; answered by Committed or CommitFailed."""

    versions: VersionSet
    leased: tuple[int, ...] = ()  # workers with slots leased to the drafter


class AbortDrafter(StepCommand):
    """Drop a prepared drafter that will not serve; not answered."""

    drafter_version: int


class Evaluate(StepCommand):
    """Evaluate a set after `step` finished steps; answered by EvaluationDone."""

    kind: Evaluation
    versions: VersionSet


class CloseStep(Command):
    """The step's policy serves; write the step's record."""

    step: int


class SaveCheckpoints(StepCommand):
    """Write the trainers' checkpoints; answered by CheckpointsSaved."""


class AwaitService(Command):
    """Wait until a service is back; answered by ServiceBack, or by CallFailed if the run
    needs it.
    """

    service: Service


class HandBack(StepCommand):
    """After a failure: trainers leave their slots and the engine takes them; not answered."""

    drafter_epoch: int  # of a lease that has not ended; 0: none
    policy: bool  # the policy may still be training


class FinishRun(Command):
    """End the run; `failure` is empty on success."""

    failure: str


class Refuse(Command):
    """Report that a late event of an old lease, set or call had no effect."""

    event: str
    seen: int
    current: int


class Decision(NamedTuple):
    """The state after an event, the commands, and the phase to enter next, if any."""

    state: State
    commands: tuple[Command, ...] = ()
    enters: Phase | None = None


def refused(state: State, event: Event, seen: int, current: int) -> Decision:
    """Refuses an event without a change."""
    return Decision(state, (Refuse(type(event).__name__, seen, current),))
