"""Declares the commands to the ranks and the news from rank 0. Imports no torch."""

from dataclasses import dataclass, field
from typing import get_args

from google.protobuf import json_format

from paceline.ranks.messages import Doing, Failed, Impaired, Save, Saved
from paceline.services.policy_trainer.audit import AuditCell, AuditState, PathVerdict
from paceline.tagged_json import TaggedJson
from paceline.v1.trajectory_pb2 import CommandContext


@dataclass(frozen=True, slots=True)
class Wanted:
    """A step and its awaited groups."""

    step: int
    policy_version: int  # weights at the step's start; training adds 1
    groups: tuple[tuple[str, int], ...]  # (group id, sessions); 0 sessions: no wait
    deadline_s: float
    left_out: frozenset[str] = frozenset()  # groups of equal rewards, replaced by other groups


@dataclass(frozen=True, slots=True)
class Train:
    """Collect the groups, take an optimiser step, and push the weights."""

    wanted: Wanted
    context: str  # CommandContext of the call, JSON
    carrier: dict[str, str] = field(default_factory=dict)  # trace context
    command_id: int = 0

    def sender(self) -> CommandContext:
        """Run, step and lease of the call."""
        return json_format.Parse(self.context, CommandContext())


@dataclass(frozen=True, slots=True)
class Keep:
    """Write a checkpoint and keep it, if no evaluation was better. The reply is Saved of the best
    checkpoint.
    """

    evaluation: float
    command_id: int = 0


@dataclass(frozen=True, slots=True)
class Learn:
    """Run an order of the Tinker front. The reply is Learned."""

    request: str  # LearnRequest of the call, JSON
    command_id: int = 0


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """Counts and statistics of a batch."""

    trajectories: int = 0
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> groups
    # policy versions between the oldest token and the trained weights -> trajectories
    staleness: dict[str, int] = field(default_factory=dict)
    zero_variance_groups: int = 0  # trained, but without gradient
    reward_mean: float = 0.0  # over sessions
    reward_std: float = 0.0  # over sessions
    batch_hash: str = ""  # over the sorted batch's token ids


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Measurements of an optimiser step. Means cover all trained tokens, also tokens without
    gradient.
    """

    figures: dict[str, float] = field(default_factory=dict)  # by name; finite figures only
    train_s: float = 0.0
    world_size: int = 0
    skipped_updates: int = 0  # updates with a non-finite loss or gradient
    cells: dict[str, AuditCell] = field(default_factory=dict)  # audited gaps by cell


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the trainer."""

    policy_version: int = 0
    step: int = -1  # last RL step trained
    trajectories_trained: int = 0
    checkpoint_version: int = 0
    batch: BatchFacts = field(default_factory=BatchFacts)  # of that step
    figures: StepFacts = field(default_factory=StepFacts)  # of that step
    skipped_in_row: int = 0  # last steps that skipped an update
    audit: AuditState = field(default_factory=AuditState)
    beyond: tuple[PathVerdict, ...] = ()  # paths named by that step's audit


@dataclass(frozen=True, slots=True)
class Batched:
    """All groups are closed and read."""

    command_id: int
    batch: BatchFacts


@dataclass(frozen=True, slots=True)
class Stepped:
    """The weights are updated, and are on the CPU of rank 0. With command 0, the first news: the
    ranks hold the model and have replayed the steps after the checkpoint.
    """

    command_id: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class Pushed:
    """The receivers hold the new version; the last news of a Train command."""

    command_id: int
    policy_version: int
    bytes: int
    push_s: float
    lm_head_hash: str
    replaced: bool = False  # replaced an unserved version with other bits at the gateway


@dataclass(frozen=True, slots=True)
class Learned:
    """The order is done; the last news of a Learn command."""

    command_id: int
    answer: str  # LearnResponse, JSON


Command = Train | Save | Keep | Learn
News = Batched | Stepped | Pushed | Saved | Learned
Message = Command | News | Failed | Impaired | Doing
MESSAGES = TaggedJson[Message](*get_args(Message))
