"""Computes a rollout's figures from the gateway's messages."""

import hashlib
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from paceline.arm_names import OFF, speculator_of
from paceline.report.solved import groups_solved, samples_unscored, truncated_share
from paceline.services.coordinator.journal.groups import FIGURE, group_figure
from paceline.services.coordinator.machine.events import UNSCORED, Figure
from paceline.speculators.kinds import SPECULATORS
from paceline.trajectory import NEAR_TIE_GAP
from paceline.v1.drafter_pb2 import RoundCosts
from paceline.v1.engine_pb2 import ArmStats
from paceline.v1.rollout_pb2 import RunTasksRequest, SampleFinished, TasksFinished
from paceline.v1.trajectory_pb2 import SpeculationStats

UNTRAINED = {"", *(name for name, kind in SPECULATORS.items() if not kind.trained)}
"""Speculators without weights; the empty name is the arm "off"."""
LEAST_ROUNDS = 64
"""Minimum rounds of an arm to estimate its acceptance length within some percent."""


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


def accept_lengths(stats: SpeculationStats) -> dict[str, float]:
    """Mean tokens of a drafted round for each arm of a trained drafter with at least LEAST_ROUNDS
    rounds.
    """
    tokens = stats.arm_round_tokens
    return {
        arm: tokens[arm] / rounds
        for arm, rounds in sorted(stats.arm_drafted_rounds.items())
        if rounds >= LEAST_ROUNDS and speculator_of(arm) not in UNTRAINED
    }


def combined_hash(hashes: Iterable[str]) -> str:
    """sha256 over hashes in order, hex, first 16 characters."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


def quantile(ordered: Sequence[int], share: float) -> int:
    """Smallest value that at least `share` of the values do not exceed; 0 without values."""
    if not ordered:
        return 0
    return ordered[max(0, min(len(ordered), -int(-len(ordered) * share // 1)) - 1)]


def round_costs(arms: Iterable[ArmStats]) -> list[RoundCosts]:
    """The measured costs of rounds, by batch-size group.

    The time of a row's round is its mean tokens divided by its tokens per second. Costs are
    relative to a round without drafts of the same group, else of the nearest group. Groups without
    such a reference are left out.
    """
    groups: dict[int, dict[str, ArmStats]] = {}
    for arm in arms:
        if arm.pulls and arm.mean_tokens_per_s > 0 and arm.mean_accept_length > 0:
            groups.setdefault(arm.batch_group, {})[arm.arm] = arm
    plain = {group: _plain_seconds(group, groups) for group in sorted(groups)}
    known = {group: seconds for group, seconds in plain.items() if seconds}
    spent = {
        group: group * sum(arm.pulls * _row_seconds(arm) for arm in groups[group].values())
        for group in known
    }
    return [
        RoundCosts(
            batch_group=group,
            share=spent[group] / sum(spent.values()),
            costs={
                name: _row_seconds(arm) / seconds
                for name, arm in sorted(groups[group].items())
                if name != OFF
            },
            rival=_rival(groups[group], seconds),
        )
        for group, seconds in known.items()
    ]


def _rival(arms: Mapping[str, ArmStats], seconds: float) -> float:
    """Tokens of the best untrained speculator in the time of a round without drafts; at least 1."""
    found = [arm for name, arm in arms.items() if speculator_of(name) in UNTRAINED]
    return max([1.0, *(arm.mean_tokens_per_s * seconds for arm in found)])


def _plain_seconds(group: int, groups: Mapping[int, Mapping[str, ArmStats]]) -> float:
    """Seconds of a row's round without drafts, or 0 without a reference.

    A bandit may never pull the arm "off". Then the cost of a shared arm is scaled from the nearest
    group that measured both.
    """
    own = groups[group]
    if OFF in own:
        return _row_seconds(own[OFF])
    for other in sorted(groups, key=lambda one: abs(math.log(one / group))):
        there = groups[other]
        if OFF in there and (shared := own.keys() & there.keys()):
            return statistics.median(
                _row_seconds(own[name]) * _row_seconds(there[OFF]) / _row_seconds(there[name])
                for name in shared
            )
    return 0.0


def _row_seconds(arm: ArmStats) -> float:
    return arm.mean_accept_length / arm.mean_tokens_per_s


def pulls(arms: Iterable[ArmStats]) -> dict[str, float | int]:
    """Rounds by arm since the workers started, summed over batch-size groups."""
    summed: dict[str, float | int] = {}
    for arm in arms:
        summed[arm.arm] = summed.get(arm.arm, 0) + arm.pulls
    return dict(sorted(summed.items()))
