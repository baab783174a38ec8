"""Turns the groups of a step into the input of its optimiser step, and into figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.services.policy_trainer.algorithms.advantages import without_variance
from paceline.services.policy_trainer.batches.batch import TrainBatch, make_batch
from paceline.services.policy_trainer.batches.groups import Batch
from paceline.services.policy_trainer.batches.records import StepRecord
from paceline.services.policy_trainer.messages import BatchFacts
from paceline.services.policy_trainer.metrics import GROUPS_DROPPED, STALENESS
from paceline.telemetry import get_logger
from paceline.trajectory import tokens_hash

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Collected:
    """One step's batch, as tensors and in figures."""

    record: StepRecord
    tensors: TrainBatch
    facts: BatchFacts
    links: tuple[str, ...]  # traceparents of the batch's sessions
    waited_s: float = 0.0  # seconds until its groups were closed


def collected_of(batch: Batch, audit_share: float, waited_s: float = 0.0) -> Collected:
    """The batch as tensors and figures; about `audit_share` of it is audited."""
    trajectories = batch.trajectories
    tensors = make_batch(trajectories, batch.record.policy_version, audit_share)
    mean, std = reward_spread(tensors.rewards.tolist(), tensors.weights.tolist())
    still = without_variance(tensors.rewards, tensors.groups)
    facts = BatchFacts(
        trajectories=len(trajectories),
        tokens=sum(len(t.token_ids) for t in trajectories),
        dropped=batch.record.dropped_groups,
        staleness={str(lag): count for lag, count in batch.staleness.items()},
        zero_variance_groups=len(set(tensors.groups[still].tolist())),
        reward_mean=mean,
        reward_std=std,
        batch_hash=tokens_hash([token for t in trajectories for token in t.token_ids]),
    )
    return Collected(batch.record, tensors, facts, batch.links, waited_s)


def count_batch(batch: Batch) -> None:
    """Records the trained and dropped trajectories of a new batch as metrics."""
    for lag, count in batch.staleness.items():
        for _ in range(count):
            STALENESS.record(lag)
    for reason, groups in batch.record.dropped_groups.items():
        GROUPS_DROPPED.record(groups, reason=reason)
        _log.warning("groups_dropped", step=batch.record.step, reason=reason, groups=groups)


def reward_spread(rewards: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Weighted mean and population standard deviation of the rewards; 0 without rewards."""
    if not rewards:
        return 0.0, 0.0
    mean = statistics.fmean(rewards, weights)
    return mean, math.sqrt(statistics.fmean([(reward - mean) ** 2 for reward in rewards], weights))
