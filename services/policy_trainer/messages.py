"""Declares the commands to the ranks and the news from rank 0. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from paceline.ranks.messages import Doing, Failed, Impaired, Save, Saved
from paceline.services.policy_trainer.audit import AuditCell, AuditState, PathVerdict
from paceline.tagged_json import TaggedJson
from paceline.v1.trajectory_pb2 import CommandContext


@dataclass(frozen=True, slots=True)
class Sender:
    """Who commands, under which lease, within which trace."""

    run_id: str
    step: int
    epoch: int
    lease_proof: str = ""
    carrier: dict[str, str] = field(default_factory=dict)  # trace context

    def context(self) -> CommandContext:
        """As the wire carries it."""
        proof = self.lease_proof
        return CommandContext(
            run_id=self.run_id, step=self.step, epoch=self.epoch, lease_proof=proof
        )


@dataclass(frozen=True, slots=True)
class Train:
    """Collect the groups, step, push."""

    sender: Sender
    policy_version: int  # generated the step; the result is one more
    groups: list[tuple[str, int]]  # (group id, sessions)
    left_out: list[str]  # those of them that are waited for and dropped
    group_deadline_s: float
    command_id: int = 0


@dataclass(frozen=True, slots=True)
class Keep:
    """Write a checkpoint and keep it, if no evaluation was better; answered by Kept."""

    evaluation: float
    command_id: int = 0


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What a batch consists of."""

    trajectories: int = 0
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> groups
    # policy versions between the oldest token and the weights trained -> trajectories
    staleness: dict[str, int] = field(default_factory=dict)
    zero_variance_groups: int = 0  # trained, but without gradient
    reward_mean: float = 0.0  # over sessions
    reward_std: float = 0.0  # over sessions
    batch_hash: str = ""  # over the sorted batch's token ids


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What an optimiser step measured; means over trained tokens, those without gradient too."""

    figures: dict[str, float] = field(default_factory=dict)  # by name; none that was not finite
    train_s: float = 0.0
    world_size: int = 0
    skipped_updates: int = 0  # not taken: the loss or the gradient was not finite
    cells: dict[str, AuditCell] = field(default_factory=dict)  # what of it was audited


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the trainer stands."""

    policy_version: int = 0
    step: int = -1  # last RL step trained
    trajectories_trained: int = 0
    checkpoint_version: int = 0
    batch: BatchFacts = field(default_factory=BatchFacts)  # of that step
    figures: StepFacts = field(default_factory=StepFacts)  # of that step
    skipped_in_row: int = 0  # last steps that skipped an update
    audit: AuditState = field(default_factory=AuditState)
    beyond: tuple[PathVerdict, ...] = ()  # what the audit of that step has named


@dataclass(frozen=True, slots=True)
class Started:
    """The first news: the ranks hold the model and have replayed what the checkpoint missed."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class Batched:
    """All groups are closed and read."""

    command_id: int
    batch: BatchFacts


@dataclass(frozen=True, slots=True)
class Stepped:
    """The weights have moved and are on the CPU of rank 0."""

    command_id: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class Pushed:
    """The receivers hold the new version; the last word of a Train."""

    command_id: int
    policy_version: int
    bytes: int
    push_s: float
    lm_head_hash: str
    replaced: bool = False  # other bits of it were at the gateway and did not serve yet


@dataclass(frozen=True, slots=True)
class Kept:
    """The best checkpoint, on disk."""

    command_id: int
    path: str
    version: int


Command = Train | Save | Keep
News = Batched | Stepped | Pushed | Saved | Kept
Message = Command | News | Started | Failed | Impaired | Doing
MESSAGES = TaggedJson[Message](*get_args(Message))
