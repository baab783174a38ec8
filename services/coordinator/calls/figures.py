"""Computes a rollout's figures from the gateway's messages."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from paceline.report.solved import groups_solved, samples_unscored, truncated_share
from paceline.services.coordinator.journal.groups import FIGURE, group_figure
from paceline.services.coordinator.machine.events import UNSCORED, Figure
from paceline.trajectory import NEAR_TIE_GAP
from paceline.v1.engine_pb2 import ArmStats
from paceline.v1.rollout_pb2 import RunTasksRequest, SampleFinished, TasksFinished
from paceline.v1.trajectory_pb2 import SpeculationStats


class FinishedSamples:
    """Finished samples of one step by (task index, sample index). A repeated call replaces samples.

    Samples of agents' own groups have no task here, and agents choose their sample numbers. The
    session distinguishes such samples.
    """

    def __init__(self, request: RunTasksRequest) -> None:
        self._index = {task.group_id: task.task_index for task in request.tasks}
        self._found: dict[tuple[int, str, int, str], SampleFinished] = {}

    def add(self, sample: SampleFinished) -> None:
        """Adds one sample."""
        index, number = self._index.get(sample.group_id), sample.sample_index
        own = (0, sample.group_id, number, sample.session_id)
        self._found[own if index is None else (index, "", number, "")] = sample

    @property
    def ordered(self) -> list[SampleFinished]:
        """Samples by task and sample index, independent of the order in which they ended."""
        return [self._found[key] for key in sorted(self._found)]


def rollout_figures(
    samples: Sequence[SampleFinished], finished: TasksFinished, solved_above: float
) -> dict[str, Figure]:
    """All rollout figures of a step's record. A reward above `solved_above` solves a task."""
    rewards = [sample.reward.value for sample in samples if sample.HasField("reward")]
    lengths = sorted(sample.response_tokens for sample in samples)
    return {
        "samples": len(samples),
        "scored": finished.scored,
        "unscored": finished.unscored,
        UNSCORED: samples_unscored(samples),
        "reward_mean": sum(rewards) / len(rewards) if rewards else 0.0,
        "reward_parts": reward_parts(samples),
        "response_tokens": finished.response_tokens,
        "rollout_s": finished.rollout_s,
        "accept_length": accept_length(finished.speculation),
        "drafted_rounds": finished.speculation.drafted_rounds,
        **{
            name: dict(sorted(getattr(finished.speculation, name).items()))
            for name in ("arm_drafted_rounds", "arm_round_tokens")
        },
        "trained_rounds": finished.speculation.trained_rounds,
        "trained_round_tokens": finished.speculation.trained_round_tokens,
        "truncated_share": truncated_share(samples),
        "groups_solved": groups_solved(samples, solved_above),
        "near_ties": sum(sample.smallest_gap < NEAR_TIE_GAP for sample in samples),
        "tokens_hash": combined_hash(sample.tokens_hash for sample in samples),
        "length_quantiles": tuple(quantile(lengths, share) for share in (0.5, 0.9, 1.0)),
        "pulls": pulls(finished.arms),
        FIGURE: group_figure(finished.closed_groups),
    }


def reward_parts(samples: Iterable[SampleFinished]) -> dict[str, float | int]:
    """Mean of each part of a reward mixture, over the samples that have it."""
    given: dict[str, list[float]] = {}
    for sample in samples:
        for part, value in sample.reward.parts.items():
            given.setdefault(part, []).append(value)
    return {part: math.fsum(values) / len(values) for part, values in sorted(given.items())}


def message_figures(message: Message, *left_out: str) -> dict[str, Figure]:
    """The fields of a message except `left_out`: scalars, lists of scalars and maps to scalars."""
    names = [field.name for field in message.DESCRIPTOR.fields if field.name not in left_out]
    return {name: _figure(getattr(message, name)) for name in names}


def _figure(value: Any) -> Figure:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float | str):
        return value
    return dict(value) if isinstance(value, Mapping) else tuple(value)


def accept_length(stats: SpeculationStats) -> float:
    """Mean tokens of a drafted round, bonus token included; 0 without drafted rounds."""
    return stats.drafted_round_tokens / stats.drafted_rounds if stats.drafted_rounds else 0.0


def combined_hash(hashes: Iterable[str]) -> str:
    """sha256 over hashes in order, hex, first 16 characters."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


def quantile(ordered: Sequence[int], share: float) -> int:
    """Smallest value that at least `share` of the values do not exceed; 0 without values."""
    if not ordered:
        return 0
    return ordered[max(0, min(len(ordered), -int(-len(ordered) * share // 1)) - 1)]


def pulls(arms: Iterable[ArmStats]) -> dict[str, float | int]:
    """Rounds by arm since the workers started, summed over batch-size groups."""
    summed: dict[str, float | int] = {}
    for arm in arms:
        summed[arm.arm] = summed.get(arm.arm, 0) + arm.pulls
    return dict(sorted(summed.items()))
