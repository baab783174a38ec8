"""Which of the trajectories that are here a step trains, which it drops, and why.

A group counts sessions. A session is complete when all its branches are here
(Trajectory.branch_count), and is trained whole or not at all. A group ages as a unit: its long
sessions are the first to be stale, so leaving out the stale ones alone would bias the mean that
the others are compared with. A group may come from another draw than the step that trains it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from paceline.telemetry import get_logger
from paceline.trajectory import Trajectory
from policy_trainer.batches.records import StepRecord
from policy_trainer.metrics import NOT_FINITE

LEAST_SIBLINGS = 2
"""Sessions without which a group has nothing to compare, unless it was opened for one."""
ABANDONED = 8
"""Policy versions beyond the bound after which a group that no step has asked for is given up."""
_log = get_logger(__name__)


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

    def refusal(self) -> str:
        """Why it is not trained, counted and logged; empty when it is. One bad branch drops all:
        half a session is not the attempt that earned the reward, and would weigh less than its
        siblings.
        """
        if not self.complete:
            return "incomplete_session"
        if any(held.trajectory.reward is None for held in self.branches):
            return "unscored"
        if not all(held.trajectory.finite for held in self.branches):
            NOT_FINITE.record(what="session")
            _log.warning("session_not_finite", branch=str(self.branches[0].trajectory.key))
            return "not_finite"
        return ""


def is_complete(wanted: Wanted, here: Iterable[HeldTrajectory]) -> bool:
    """Whether every wanted group has all its sessions complete."""
    sessions = _sessions(wanted, here)
    return all(
        sum(one.complete for one in sessions[group]) >= size for group, size in wanted.groups
    )


def close(wanted: Wanted, here: Sequence[HeldTrajectory], max_staleness: int) -> Batch:
    """The step's batch of what is here, as the groups stand."""
    closing = _Closing(wanted.policy_version, max_staleness)
    sessions = _sessions(wanted, here)
    for group, size in wanted.groups:
        closing.take(sessions[group], size)
    closing.give_up(_draws(here), {group for group, _ in wanted.groups})
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
    trained: list[HeldTrajectory] = field(default_factory=list)
    dropped: dict[str, tuple[str, str]] = field(default_factory=dict)
    groups: Counter[str] = field(default_factory=Counter)

    def take(self, sessions: Sequence[_Session], size: int) -> None:
        """Trains the usable sessions of a group if there are at least two and no token of the group
        is stale; else the group is dropped under a reason.

        A group opened for a single session needs no sibling. The size asked for does not tell: it
        leaves out sessions that ended without a reward.
        """
        if self._lag(sessions) > self.max_staleness:
            for session in sessions:
                self._drop(session, session.refusal() or "stale")
            self.groups["stale"] += 1
            return
        usable: list[_Session] = []
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
            self.trained.extend(held for session in usable for held in session.branches)
            return
        self.groups[reason] += 1
        for session in usable:
            self._drop(session, "too_few_siblings")

    def give_up(self, draws: dict[tuple[str, int], list[_Session]], asked: Container[str]) -> None:
        """Drops whole groups that nobody has asked for and that are long stale."""
        for (group, _), sessions in draws.items():
            if group not in asked and self._lag(sessions) > self.max_staleness + ABANDONED:
                for session in sessions:
                    self._drop(session, "stale")

    def _drop(self, session: _Session, reason: str) -> None:
        for held in session.branches:
            self.dropped[held.entry_id] = (str(held.trajectory.key), reason)

    def _lag(self, sessions: Sequence[_Session]) -> int:
        """Policy versions between the oldest token of the sessions and the weights trained; 0
        without tokens.
        """
        lags = [held.lag(self.policy_version) for one in sessions for held in one.branches]
        return max(lags, default=0)


def _sessions(wanted: Wanted, here: Iterable[HeldTrajectory]) -> dict[str, list[_Session]]:
    """Sessions of each wanted group, complete or not. Of a group name that agents used again those
    of its newest draw count.
    """
    names = dict.fromkeys(group for group, _ in wanted.groups)
    found: dict[str, list[_Session]] = {group: [] for group in names}
    for (group, _), sessions in sorted(_draws(here, names).items()):
        found[group] = sessions
    return found


def _draws(
    here: Iterable[HeldTrajectory], names: Container[str] | None = None
) -> dict[tuple[str, int], list[_Session]]:
    """Sessions by group (None: of all groups) and the step that drew them."""
    found: dict[tuple[str, int], dict[str, _Session]] = {}
    for held in here:
        one = held.trajectory
        if names is None or one.group_id in names:
            sessions = found.setdefault((one.group_id, one.step), {})
            sessions.setdefault(one.key.session_id, _Session()).branches.append(held)
    return {draw: list(sessions.values()) for draw, sessions in found.items()}
