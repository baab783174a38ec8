"""Selects the trajectories that a step trains, and drops all other trajectories with a reason.

A group counts sessions. A session is complete when all its branches are present
(Trajectory.branch_count), and is trained whole or not at all. A group ages as a unit: its long
sessions are the first to be stale, so dropping only stale sessions would bias the mean of the
group. A group may be from another draw than the step that trains it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from paceline.services.policy_trainer.batches.held import (
    HeldDraw,
    HeldGroups,
    HeldSession,
    HeldTrajectory,
)
from paceline.services.policy_trainer.batches.records import StepRecord
from paceline.trajectory import Trajectory

LEAST_SIBLINGS = 2
"""Least number of sessions for a comparison, unless the group was opened for one session."""
NO_VARIANCE = "no_variance"
"""Reason for dropping a group with equal rewards."""
FILTERED = "filtered"
"""Reason for dropping a group that a user's filter rejects."""
GroupFilter = Callable[[Sequence[Trajectory]], bool]
ABANDONED = 8
"""Policy versions beyond the bound after which an unrequested group is dropped."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A step and its awaited groups."""

    step: int
    policy_version: int  # weights at the step's start
    groups: tuple[tuple[str, int], ...]  # (group id, sessions); 0 sessions: no wait
    deadline_s: float
    left_out: frozenset[str] = frozenset()  # groups of equal rewards, replaced by other groups


@dataclass(frozen=True, slots=True)
class Batch:
    """The trained and dropped trajectories of a step, sorted by (task, group, sample, session,
    branch).
    """

    record: StepRecord
    held: tuple[HeldTrajectory, ...]
    links: tuple[str, ...] = ()  # traceparents of the sessions, each once

    @property
    def trajectories(self) -> list[Trajectory]:
        """In batch order."""
        return [h.trajectory for h in self.held]

    @property
    def staleness(self) -> dict[int, int]:
        """Number of trajectories by age of their oldest token in policy versions, lowest
        age first.
        """
        return dict(sorted(Counter(h.lag(self.record.policy_version) for h in self.held).items()))


def _order(held: HeldTrajectory) -> tuple[int, str, int, str, int, str]:
    """Sort key of a trajectory in its batch, independent of the order of arrival."""
    one = held.trajectory
    branch = one.key.branch_id
    return one.task_index, one.group_id, one.sample_index, one.key.session_id, len(branch), branch


def is_complete(wanted: Wanted, here: HeldGroups) -> bool:
    """Whether every wanted group has all its sessions complete."""
    return all(here.newest(group).complete >= size for group, size in wanted.groups)


def close(
    wanted: Wanted, here: HeldGroups, max_staleness: int, keeps: GroupFilter | None = None
) -> Batch:
    """The step's batch from the present trajectories. Raises the errors of `keeps`."""
    closing = _Closing(wanted.policy_version, max_staleness, keeps)
    for group, size in wanted.groups:
        if group in wanted.left_out:
            closing.leave_out(here.newest(group))
        else:
            closing.take(here.newest(group), size)
    closing.give_up(here, {group for group, _ in wanted.groups})
    order = sorted(closing.trained, key=_order)
    record = StepRecord(
        step=wanted.step,
        policy_version=wanted.policy_version,
        trained={h.entry_id: str(h.trajectory.key) for h in order},
        dropped=closing.dropped,
        dropped_groups=dict(closing.groups),
    )
    return batch_of(record, order)


def batch_of(record: StepRecord, held: Sequence[HeldTrajectory]) -> Batch:
    """A recorded step with its trajectories, in their order."""
    links = dict.fromkeys(h.traceparent for h in held if h.traceparent)
    return Batch(record, tuple(held), tuple(links))


@dataclass(slots=True)
class _Closing:
    """The trajectories of one step, sorted while its groups close."""

    policy_version: int
    max_staleness: int
    keeps: GroupFilter | None
    trained: list[HeldTrajectory] = field(default_factory=list)
    dropped: dict[str, tuple[str, str]] = field(default_factory=dict)
    groups: Counter[str] = field(default_factory=Counter)

    def take(self, draw: HeldDraw, size: int) -> None:
        """Trains the usable sessions of a group, if there are at least two and no token of the
        group is stale. Otherwise drops the group with a reason.

        A group opened for a single session needs no sibling. The requested size is no criterion,
        since it excludes sessions that ended without a reward.
        """
        sessions = list(draw.sessions.values())
        if draw.lag(self.policy_version) > self.max_staleness:
            for session in sessions:
                self._drop(session, session.refusal() or "stale")
            self.groups["stale"] += 1
            return
        usable: list[HeldSession] = []
        reason = "too_few_siblings" if sessions or size else "unscored"
        for session in sessions:
            if refused := session.refusal():
                reason = refused
                self._drop(session, refused)
            else:
                usable.append(session)

        opened_for = max(
            (h.trajectory.group_size for one in sessions for h in one.branches),
            default=LEAST_SIBLINGS,
        )
        if usable and len(usable) >= min(LEAST_SIBLINGS, opened_for):
            branches = [held for session in usable for held in session.branches]
            if self.keeps is None or self.keeps([held.trajectory for held in branches]):
                self.trained += branches
                return
            reason = FILTERED
        self.groups[reason] += 1
        for session in usable:
            self._drop(session, FILTERED if reason == FILTERED else "too_few_siblings")

    def leave_out(self, draw: HeldDraw) -> None:
        """Drops a group that dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) has
        replaced.
        """
        self.groups[NO_VARIANCE] += 1
        for session in draw.sessions.values():
            self._drop(session, session.refusal() or NO_VARIANCE)

    def give_up(self, here: HeldGroups, asked: Container[str]) -> None:
        """Drops whole unrequested groups that have been stale for long."""
        for draw in here.aged(self.policy_version - self.max_staleness - ABANDONED, asked):
            for session in draw.sessions.values():
                self._drop(session, "stale")

    def _drop(self, session: HeldSession, reason: str) -> None:
        for held in session.branches:
            self.dropped[held.entry_id] = (str(held.trajectory.key), reason)
