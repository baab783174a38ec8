"""Measured rounds of all arms, in the form in which the drafter trainer's gate reads them."""

import math
import statistics
from collections.abc import Iterable, Mapping

from paceline.arm_names import OFF, speculator_of
from paceline.speculators.kinds import SPECULATORS
from paceline.v1.drafter_pb2 import RoundCosts
from paceline.v1.engine_pb2 import ArmStats
from paceline.v1.trajectory_pb2 import SpeculationStats

UNTRAINED = {"", *(name for name, kind in SPECULATORS.items() if not kind.trained)}
"""Speculators without weights; the empty name is the arm "off"."""
LEAST_ROUNDS = 64
"""Minimum rounds of an arm to estimate its acceptance length within some percent."""


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
