"""Reads closed groups from the trajectory stream, for the steps that request them (groups.py).

Trained entries are acknowledged only on `release`: until checkpoints hold a step, its entries stay
in Redis and can be replayed. This module makes no tensors.
"""

import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import DataLoss, ResourceExhausted
from paceline.services.policy_trainer import messages, metrics
from paceline.services.policy_trainer.algorithms.advantages import without_variance
from paceline.services.policy_trainer.batches import groups as held_groups
from paceline.services.policy_trainer.batches.batch import TrainBatch, make_batch
from paceline.services.policy_trainer.batches.records import StepRecord
from paceline.streams import Entry, Ledger, RedisStream, decode_trajectory, trajectory_key
from paceline.telemetry import get_logger, names, span
from paceline.trajectory import tokens_hash

GROUP, CONSUMER = "policy", "policy-0"
MAX_PENDING = 65_536
"""Trajectories held for later steps, of a few KB each. Beyond this number they stay unread in
Redis.
"""
_READ_COUNT = 256
_log = get_logger(__name__)


class Batcher:
    """Reader of one run's trajectory stream, the only consumer of group "policy"."""

    def __init__(
        self,
        stream: RedisStream,
        marks: Ledger,
        *,
        max_staleness: int,
        max_pending: int = MAX_PENDING,
        keeps: held_groups.GroupFilter | None = None,
    ) -> None:
        """`keeps`: a user's filter of groups; its answers are in the step's record."""
        self._stream = stream
        self._marks = marks
        self._max_staleness = max_staleness
        self._max_pending = max_pending
        self._keeps = keeps
        self._held = held_groups.HeldGroups()  # not yet in a batch
        self._trained: set[str] = set()  # entry ids in batches that are in no checkpoint yet
        self.dead_letters = 0

    async def open(self) -> None:
        """Creates the group, and takes over entries that an earlier process read and did not
        acknowledge.
        """
        await self._stream.create_group(GROUP)
        for entry in await self._stream.unacked(GROUP, CONSUMER):
            await self._admit(entry)

    async def collect(self, wanted: messages.Wanted) -> held_groups.Batch:
        """Waits until every wanted group has all its sessions complete, or until the deadline, and
        closes the groups. Everything in the stream by then counts, even if this process runs late.

        Raises ResourceExhausted when the trajectories held for other steps reach the bound,
        Unavailable when Redis stays away.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + wanted.deadline_s
        while not held_groups.is_complete(wanted, self._held):
            remaining = max(end - loop.time(), 0.0)
            if len(self._held) >= self._max_pending:
                message = "too many trajectories are held for other steps"
                seen, allowed = len(self._held), self._max_pending
                raise ResourceExhausted(message, seen=seen, allowed=allowed)
            entries = await self._stream.read(GROUP, CONSUMER, _READ_COUNT, remaining)
            with span(
                names.TRAJECTORY_READ,
                kind="consumer",
                links=[e.fields.get("traceparent", "") for e in entries],
            ):
                for entry in entries:
                    await self._admit(entry)
            if not remaining and len(entries) < _READ_COUNT:
                break

        return held_groups.close(wanted, self._held, self._max_staleness, self._keeps)

    def replay(self, record: StepRecord) -> held_groups.Batch:
        """The batch of a recorded step again. Raises DataLoss when an entry is missing."""
        missing = [entry for entry in record.trained if entry not in self._held]
        if missing:
            message = f"step {record.step} cannot be replayed: entries of its batch are gone"
            raise DataLoss(message, seen=missing[:4])
        return held_groups.batch_of(record, [self._held[entry] for entry in record.trained])

    async def settle(self, record: StepRecord) -> None:
        """Records and removes the dropped trajectories of a step, and frees the memory of its
        trained trajectories.

        Call it when the record is on disk.
        """
        await self._marks.mark_dropped(dict(record.dropped.values()))
        await self._acknowledge(record.dropped)
        self._trained.update(record.trained)
        for entry_id in record.trained:
            self._held.remove(entry_id)

    async def mark(self, record: StepRecord) -> None:
        """Records the trained trajectories of a step; a repetition changes nothing."""
        await self._marks.mark_trained(list(record.trained.values()), record.step)

    async def release(self, record: StepRecord) -> None:
        """Acknowledges and deletes the entries of a step that a checkpoint holds."""
        await self.mark(record)
        await self._acknowledge(record.trained)
        self._trained.difference_update(record.trained)

    async def _acknowledge(self, entries: Mapping[str, object]) -> None:
        if entries:
            await self._stream.ack(GROUP, list(entries))
        for entry_id in entries:
            self._held.remove(entry_id)

    async def _admit(self, entry: Entry) -> None:
        if entry.id in self._trained:  # delivered again
            return
        try:
            held = held_groups.HeldTrajectory(
                entry.id,
                decode_trajectory(entry.fields, entry.payload),
                entry.fields.get("traceparent", ""),
            )
        except DataLoss as error:
            await self._bury(entry, error)
        else:
            self._held.add(held)

    async def _bury(self, entry: Entry, error: DataLoss) -> None:
        self.dead_letters += 1
        metrics.DEAD_LETTERS.record()
        _log.warning(
            "trajectory_dead_letter",
            entry=entry.id,
            error=str(error),
            dead_letters=self.dead_letters,
        )
        try:
            await self._marks.mark_dropped({trajectory_key(entry.fields): "undecodable"})
        except DataLoss as nameless:
            _log.warning("dead_letter_without_branch", entry=entry.id, error=str(nameless))
        await self._stream.dead_letter(GROUP, entry, str(error))


@dataclass(frozen=True, slots=True)
class Collected:
    """One step's batch, as tensors and in figures."""

    record: StepRecord
    tensors: TrainBatch
    facts: messages.BatchFacts
    links: tuple[str, ...]  # traceparents of the batch's sessions
    waited_s: float = 0.0  # seconds until its groups were closed


def collected_of(batch: held_groups.Batch, audit_share: float, waited_s: float = 0.0) -> Collected:
    """The batch as tensors and figures; about `audit_share` of it is audited."""
    trajectories = batch.trajectories
    tensors = make_batch(trajectories, batch.record.policy_version, audit_share)
    mean, std = reward_spread(tensors.rewards.tolist(), tensors.weights.tolist())
    still = without_variance(tensors.rewards, tensors.groups)
    facts = messages.BatchFacts(
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


def reward_spread(rewards: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Weighted mean and population standard deviation of the rewards; 0 without rewards."""
    if not rewards:
        return 0.0, 0.0
    mean = statistics.fmean(rewards, weights)
    return mean, math.sqrt(statistics.fmean([(reward - mean) ** 2 for reward in rewards], weights))
