"""Reads closed groups from the trajectory stream: which trajectories a step trains, which are
dropped, and why.

A group counts sessions. A session is complete when all its branches are here
(Trajectory.branch_count), and is trained whole or not at all. A group ages as a unit: its long
sessions are the first to be stale, so leaving out the stale ones alone would bias the mean that
the others are compared with. A group may come from another draw than the step that trains it.

The batcher acknowledges nothing that trained before it is told to (release): until
checkpoints hold a step, its entries stay in Redis and can be replayed. It makes no tensors.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Container, Mapping, Sequence
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
ABANDONED = 8
"""Policy versions beyond the bound after which a group that no step has asked for is given up."""
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

    def lag(self, policy_version: int) -> int:
        """Policy versions between the oldest token and the given one; 0 without generated
        tokens.
        """
        oldest = self.oldest_version
        return policy_version - oldest if oldest is not None else 0


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

    @property
    def staleness(self) -> dict[int, int]:
        """Trajectories by the policy versions between their oldest token and the weights trained,
        fewest first.
        """
        return dict(sorted(Counter(h.lag(self.record.policy_version) for h in self.held).items()))


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
        """Sessions of each wanted group, complete or not. Of a group name that agents used again
        those of its newest draw count.
        """
        names = dict.fromkeys(group for group, _ in wanted.groups)
        found: dict[str, list[_Session]] = {group: [] for group in names}
        for (group, _), sessions in sorted(self._draws(names).items()):
            found[group] = sessions
        return found

    def _draws(self, names: Container[str] | None = None) -> dict[tuple[str, int], list[_Session]]:
        """Sessions that are here by group (None: of all groups) and the step that drew them."""
        found: dict[tuple[str, int], dict[str, _Session]] = {}
        for held in self._held.values():
            one = held.trajectory
            if names is None or one.group_id in names:
                sessions = found.setdefault((one.group_id, one.step), {})
                sessions.setdefault(one.key.session_id, _Session()).branches.append(held)
        return {draw: list(sessions.values()) for draw, sessions in found.items()}

    def _complete(self, wanted: Wanted) -> bool:
        sessions = self._sessions(wanted)
        return all(
            sum(one.complete for one in sessions[group]) >= size for group, size in wanted.groups
        )

    def _close(self, wanted: Wanted) -> Batch:
        choice = _Choice()
        sessions = self._sessions(wanted)
        for group, size in wanted.groups:
            self._close_group(sessions[group], size, wanted.policy_version, choice)
        self._give_up(wanted, choice)
        order = sorted(choice.trained, key=_order)
        record = StepRecord(
            step=wanted.step,
            policy_version=wanted.policy_version,
            trained={h.entry_id: str(h.trajectory.key) for h in order},
            dropped=choice.dropped,
            dropped_groups=dict(choice.groups),
        )
        return _batch(record, order)

    def _give_up(self, wanted: Wanted, choice: _Choice) -> None:
        """Drops whole groups that nobody has asked for and that are long stale."""
        asked = {group for group, _ in wanted.groups}
        for (group, _), sessions in self._draws().items():
            if group not in asked and _lag(sessions, wanted.policy_version) > (
                self._max_staleness + ABANDONED
            ):
                for session in sessions:
                    choice.drop_session(session, "stale")

    def _close_group(
        self, sessions: list[_Session], size: int, policy_version: int, choice: _Choice
    ) -> None:
        """Trains the usable sessions if there are at least two and no token of the group is stale;
        else the group is dropped under a reason.

        A group opened for a single session needs no sibling. The size asked for does not tell: it
        leaves out sessions that ended without a reward.
        """
        if _lag(sessions, policy_version) > self._max_staleness:
            for session in sessions:
                choice.drop_session(session, self._refusal(session) or "stale")
            choice.groups["stale"] += 1
            return
        usable: list[_Session] = []
        reason = "too_few_siblings" if sessions or size else "unscored"
        for session in sessions:
            refused = self._refusal(session)
            if refused:
                reason = refused
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

    @staticmethod
    def _refusal(session: _Session) -> str:
        """Why a session is not trained; empty when it is. One bad branch drops all: half a session
        is not the attempt that earned the reward, and would weigh less than its siblings.
        """
        if not session.complete:
            return "incomplete_session"
        if any(held.trajectory.reward is None for held in session.branches):
            return "unscored"
        if not all(held.trajectory.finite for held in session.branches):
            NOT_FINITE.record(what="session")
            _log.warning("session_not_finite", branch=str(session.branches[0].trajectory.key))
            return "not_finite"
        return ""


def _lag(sessions: Sequence[_Session], policy_version: int) -> int:
    """Policy versions between the oldest token of the sessions and the given one; 0 without
    tokens.
    """
    lags = [held.lag(policy_version) for session in sessions for held in session.branches]
    return max(lags, default=0)


def _batch(record: StepRecord, held: Sequence[HeldTrajectory]) -> Batch:
    links = dict.fromkeys(h.traceparent for h in held if h.traceparent)
    return Batch(record, tuple(held), tuple(links))
