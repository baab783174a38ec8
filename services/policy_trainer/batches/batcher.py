"""Reads closed groups from the trajectory stream: which trajectories a step trains, which are
dropped, and why.

A group counts sessions. A session is complete when all its branches are here
(Trajectory.branch_count), and is trained whole or not at all.

The batcher acknowledges nothing that trained before it is told to (release): until
checkpoints hold a step, its entries stay in Redis and can be replayed. It makes no tensors.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.errors import DataLoss, ResourceExhausted
from paceline.streams import Entry, Stream, decode_trajectory, trajectory_key
from paceline.telemetry import get_logger, span
from paceline.trajectory import Trajectory
from policy_trainer.batches.records import StepRecord
from policy_trainer.metrics import NOT_FINITE

GROUP, CONSUMER = "policy", "policy-0"
LEAST_SIBLINGS = 2
"""Sessions without which a group has nothing to compare, unless it was opened for one."""
MAX_PENDING = 65_536
"""Trajectories held for later steps, of a few KB each; beyond it they stay unread in Redis."""
_READ_COUNT = 256
_log = get_logger(__name__)


class Marks(Protocol):
    """Where the fate of branches is written; paceline.streams.Ledger is one."""

    async def mark_trained(self, keys: Sequence[str], step: int) -> None:
        """The step used these branches."""

    async def mark_dropped(self, reasons: Mapping[str, str]) -> None:
        """These branches are not trained: branch -> reason."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A step and the groups it waits for."""

    step: int
    policy_version: int  # weights the step starts from
    groups: tuple[tuple[str, int], ...]  # (group id, sessions); 0 sessions: nothing to wait for
    deadline_s: float


@dataclass(frozen=True, slots=True)
class HeldTrajectory:
    """A trajectory and the entry it came in."""

    entry_id: str
    trajectory: Trajectory
    traceparent: str

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the oldest token; None without generated tokens."""
        return min((span.policy_version for span in self.trajectory.version_spans), default=None)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains, sorted by (task, group, sample, session, branch), and what it drops."""

    record: StepRecord
    held: tuple[HeldTrajectory, ...]
    links: tuple[str, ...] = ()  # traceparents of the sessions, each once

    @property
    def trajectories(self) -> list[Trajectory]:
        """In batch order."""
        return [h.trajectory for h in self.held]


def _order(held: HeldTrajectory) -> tuple[int, str, int, str, int, str]:
    """Where a trajectory stands in its batch: the same whatever the order in which the entries
    came.
    """
    one = held.trajectory
    branch = one.key.branch_id
    return one.task_index, one.group_id, one.sample_index, one.key.session_id, len(branch), branch


@dataclass(slots=True)
class _Session:
    """The branches of one session that are here."""

    branches: list[HeldTrajectory] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all branches that are trained are here."""
        here = {held.trajectory.key.branch_id for held in self.branches}
        return len(here) >= max(held.trajectory.branch_count for held in self.branches)


@dataclass(slots=True)
class _Choice:
    """Sorting of the held trajectories of one step while it closes."""

    trained: list[HeldTrajectory] = field(default_factory=list)
    dropped: dict[str, tuple[str, str]] = field(default_factory=dict)
    groups: Counter[str] = field(default_factory=Counter)

    def drop(self, held: HeldTrajectory, reason: str) -> None:
        self.dropped[held.entry_id] = (str(held.trajectory.key), reason)

    def drop_session(self, session: _Session, reason: str) -> None:
        for held in session.branches:
            self.drop(held, reason)


class Batcher:
    """Reader of one run's trajectory stream, as the one consumer of group "policy"."""

    def __init__(
        self, stream: Stream, marks: Marks, *, max_staleness: int, max_pending: int = MAX_PENDING
    ) -> None:
        self._stream = stream
        self._marks = marks
        self._max_staleness = max_staleness
        self._max_pending = max_pending
        self._held: dict[str, HeldTrajectory] = {}  # by entry id, not yet in a batch
        self._trained: set[str] = set()  # entry ids in batches that no checkpoint holds yet
        self.dead_letters = 0

    async def open(self) -> None:
        """Makes the group and takes up what an earlier process had read and not acknowledged."""
        await self._stream.create_group(GROUP)
        for entry in await self._stream.unacked(GROUP, CONSUMER):
            await self._admit(entry)

    async def collect(self, wanted: Wanted) -> Batch:
        """Waits until every wanted group has all its sessions complete, or the deadline, and closes
        the groups.

        Raises ResourceExhausted when the trajectories held for other steps reach the bound,
        Unavailable when Redis stays away.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + wanted.deadline_s
        while not self._complete(wanted):
            remaining = end - loop.time()
            if remaining <= 0:
                break
            self._require_room()
            entries = await self._stream.read(GROUP, CONSUMER, _READ_COUNT, remaining)
            with span(
                "trajectory.read",
                kind="consumer",
                links=[e.fields.get("traceparent", "") for e in entries],
            ):
                for entry in entries:
                    await self._admit(entry)

        return self._close(wanted)

    def take(self, record: StepRecord) -> Batch:
        """The batch of a recorded step again. Raises DataLoss when an entry of it is gone."""
        missing = [entry for entry in record.trained if entry not in self._held]
        if missing:
            raise DataLoss(
                f"step {record.step} cannot be replayed: entries of its batch are gone",
                seen=missing[:4],
            )
        return _batch(record, [self._held[entry] for entry in record.trained])

    async def settle(self, record: StepRecord) -> None:
        """Writes down and removes what the step dropped; forgets what it trains.

        Call it when the record is on disk.
        """
        await self._marks.mark_dropped(dict(record.dropped.values()))
        await self._acknowledge(record.dropped)
        self._trained.update(record.trained)
        for entry_id in record.trained:
            self._held.pop(entry_id, None)

    async def mark(self, record: StepRecord) -> None:
        """Writes down what the step trained; repeating it changes nothing."""
        await self._marks.mark_trained(list(record.trained.values()), record.step)

    async def release(self, record: StepRecord) -> None:
        """Acknowledges and deletes the entries of a step that a checkpoint holds."""
        await self.mark(record)
        await self._acknowledge(record.trained)
        self._trained.difference_update(record.trained)

    async def _acknowledge(self, entries: Mapping[str, object]) -> None:
        if entries:
            await self._stream.ack(GROUP, list(entries), delete=True)
        for entry_id in entries:
            self._held.pop(entry_id, None)

    async def _admit(self, entry: Entry) -> None:
        if entry.id in self._trained:  # delivered again
            return
        try:
            held = HeldTrajectory(
                entry.id,
                decode_trajectory(entry.fields, entry.payload),
                entry.fields.get("traceparent", ""),
            )
        except DataLoss as error:
            await self._bury(entry, error)
        else:
            self._held[entry.id] = held

    async def _bury(self, entry: Entry, error: DataLoss) -> None:
        self.dead_letters += 1
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

    def _require_room(self) -> None:
        if len(self._held) >= self._max_pending:
            raise ResourceExhausted(
                "too many trajectories are held for other steps",
                seen=len(self._held),
                allowed=self._max_pending,
            )

    def _sessions(self, wanted: Wanted) -> dict[str, list[_Session]]:
        """Sessions of each wanted group, complete or not."""
        found: dict[str, dict[str, _Session]] = {group: {} for group, _ in wanted.groups}
        for held in self._held.values():
            group = held.trajectory.group_id
            if group in found and held.trajectory.step == wanted.step:
                session = found[group].setdefault(held.trajectory.key.session_id, _Session())
                session.branches.append(held)
        return {group: list(sessions.values()) for group, sessions in found.items()}

    def _complete(self, wanted: Wanted) -> bool:
        sessions = self._sessions(wanted)
        return all(
            sum(one.complete for one in sessions[group]) >= size for group, size in wanted.groups
        )

    def _stale(self, held: HeldTrajectory, policy_version: int) -> bool:
        oldest = held.oldest_version
        return oldest is not None and policy_version - oldest > self._max_staleness

    def _close(self, wanted: Wanted) -> Batch:
        choice = _Choice()
        sessions = self._sessions(wanted)
        for group, size in wanted.groups:
            self._close_group(sessions[group], size, wanted.policy_version, choice)
        chosen = {h.entry_id for h in choice.trained} | set(choice.dropped)
        for held in self._held.values():
            if held.entry_id not in chosen and self._stale(held, wanted.policy_version):
                choice.drop(held, "stale")
        order = sorted(choice.trained, key=_order)
        record = StepRecord(
            step=wanted.step,
            policy_version=wanted.policy_version,
            trained={h.entry_id: str(h.trajectory.key) for h in order},
            dropped=choice.dropped,
            dropped_groups=dict(choice.groups),
        )
        return _batch(record, order)

    def _close_group(
        self, sessions: list[_Session], size: int, policy_version: int, choice: _Choice
    ) -> None:
        """Trains the usable sessions if there are at least two; else the group is dropped under a
        reason.

        A group opened for a single session needs no sibling. The size asked for does not tell: it
        leaves out sessions that ended without a reward.
        """
        usable: list[_Session] = []
        reason = "too_few_siblings" if sessions or size else "unscored"
        for session in sessions:
            refused = self._refusal(session, policy_version)
            if refused:
                reason = refused
                if refused == "not_finite":
                    NOT_FINITE.record(what="session")
                    _log.warning(
                        "session_not_finite", branch=str(session.branches[0].trajectory.key)
                    )
                choice.drop_session(session, refused)
            else:
                usable.append(session)

        opened_for = max(
            (h.trajectory.group_size for one in sessions for h in one.branches),
            default=LEAST_SIBLINGS,
        )
        if usable and len(usable) >= min(LEAST_SIBLINGS, opened_for):
            choice.trained.extend(held for session in usable for held in session.branches)
            return
        choice.groups[reason] += 1
        for session in usable:
            choice.drop_session(session, "too_few_siblings")

    def _refusal(self, session: _Session, policy_version: int) -> str:
        """Why a session is not trained; empty when it is. One bad branch drops all: half a session
        is not the attempt that earned the reward, and would weigh less than its siblings.
        """
        if not session.complete:
            return "incomplete_session"
        if any(held.trajectory.reward is None for held in session.branches):
            return "unscored"
        if not all(held.trajectory.finite for held in session.branches):
            return "not_finite"
        return (
            "stale" if any(self._stale(held, policy_version) for held in session.branches) else ""
        )


def _batch(record: StepRecord, held: Sequence[HeldTrajectory]) -> Batch:
    links = dict.fromkeys(h.traceparent for h in held if h.traceparent)
    return Batch(record, tuple(held), tuple(links))
