"""Selects the trajectories that a step trains, and drops all other trajectories with a reason.

A group counts sessions. A session is complete when all its branches are present
(Trajectory.branch_count), and is trained whole or not at all. A group ages as a unit: its long
sessions are the first to be stale, so dropping only stale sessions would bias the mean of the
group. A group may be from another draw than the step that trains it.
"""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from paceline.services.policy_trainer.batches.records import StepRecord
from paceline.services.policy_trainer.messages import Wanted
from paceline.services.policy_trainer.metrics import NOT_FINITE
from paceline.telemetry import get_logger
from paceline.trajectory import Trajectory

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HeldTrajectory:
    """A trajectory and its stream entry."""

    entry_id: str
    trajectory: Trajectory
    traceparent: str

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the oldest token; None without generated tokens."""
        return min((span.policy_version for span in self.trajectory.version_spans), default=None)


@dataclass(slots=True)
class HeldSession:
    """The present branches of one session."""

    branches: list[HeldTrajectory] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all trained branches are present."""
        here = {held.trajectory.key.branch_id for held in self.branches}
        return len(here) >= max((one.trajectory.branch_count for one in self.branches), default=1)

    def refusal(self) -> str:
        """The reason for not training it, for counters and log; empty if it is usable. One bad
        branch drops the session: half a session is not the attempt that earned the reward, and
        would weigh less than its siblings.
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


@dataclass(slots=True)
class HeldDraw:
    """The sessions of a group that one step drew."""

    sessions: dict[str, HeldSession] = field(default_factory=dict)
    versions: Counter[int] = field(default_factory=Counter)  # branches by oldest_version

    @property
    def complete(self) -> int:
        """Number of complete sessions."""
        return sum(session.complete for session in self.sessions.values())

    def count(self, held: HeldTrajectory, change: int) -> None:
        """Counts an added branch (1) or a removed branch (-1)."""
        if (oldest := held.oldest_version) is not None:
            self.versions[oldest] += change

    def lag(self, policy_version: int) -> int:
        """Policy versions between the oldest token and the given one; 0 without tokens."""
        oldest = min((one for one, held in self.versions.items() if held), default=policy_version)
        return max(policy_version - oldest, 0)


class HeldGroups:
    """All trajectories held by one reader, by entry id and by group and draw."""

    def __init__(self) -> None:
        self._entries: dict[str, HeldTrajectory] = {}
        self._draws: dict[str, dict[int, HeldDraw]] = {}  # by group, and by the step that drew it

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._entries

    def __getitem__(self, entry_id: str) -> HeldTrajectory:
        return self._entries[entry_id]

    def add(self, held: HeldTrajectory) -> None:
        """Adds a trajectory; a redelivered one changes nothing."""
        if held.entry_id in self._entries:
            return
        self._entries[held.entry_id] = held
        one = held.trajectory
        draw = self._draws.setdefault(one.group_id, {}).setdefault(one.step, HeldDraw())
        draw.sessions.setdefault(one.key.session_id, HeldSession()).branches.append(held)
        draw.count(held, 1)

    def remove(self, entry_id: str) -> None:
        """Removes a trajectory, if present."""
        held = self._entries.pop(entry_id, None)
        if held is None:
            return
        one = held.trajectory
        draw = self._draws[one.group_id][one.step]
        session = draw.sessions[one.key.session_id]
        session.branches.remove(held)
        draw.count(held, -1)
        if not session.branches:
            del draw.sessions[one.key.session_id]
        if not draw.sessions:
            del self._draws[one.group_id][one.step]
        if not self._draws[one.group_id]:
            del self._draws[one.group_id]

    def newest(self, group: str) -> HeldDraw:
        """The newest draw of a group, since agents may reuse a group's name; empty if none is
        present.
        """
        draws = self._draws.get(group)
        return draws[max(draws)] if draws else HeldDraw()

    def aged(self, before_version: int, asked: Container[str]) -> list[HeldDraw]:
        """Draws of unrequested groups with a token older than that version."""
        unrequested = (draws for group, draws in self._draws.items() if group not in asked)
        every = (draw for draws in unrequested for draw in draws.values())
        return [draw for draw in every if draw.lag(before_version) > 0]


LEAST_SIBLINGS = 2
"""Least number of sessions for a comparison, unless the group was opened for one session."""
GroupFilter = Callable[[Sequence[Trajectory]], bool]
ABANDONED = 8
"""Policy versions beyond the bound after which an unrequested group is dropped."""


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
        now, versions = self.record.policy_version, (held.oldest_version for held in self.held)
        return dict(
            sorted(Counter(now - one if one is not None else 0 for one in versions).items())
        )


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
            reason = "filtered"
        self.groups[reason] += 1
        for session in usable:
            self._drop(session, "filtered" if reason == "filtered" else "too_few_siblings")

    def leave_out(self, draw: HeldDraw) -> None:
        """Drops a group that dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) has
        replaced.
        """
        self.groups["no_variance"] += 1
        for session in draw.sessions.values():
            self._drop(session, session.refusal() or "no_variance")

    def give_up(self, here: HeldGroups, asked: Container[str]) -> None:
        """Drops whole unrequested groups that have been stale for long."""
        for draw in here.aged(self.policy_version - self.max_staleness - ABANDONED, asked):
            for session in draw.sessions.values():
                self._drop(session, "stale")

    def _drop(self, session: HeldSession, reason: str) -> None:
        for held in session.branches:
            self.dropped[held.entry_id] = (str(held.trajectory.key), reason)
