"""Keeps waiting trajectories by group. The cost of an entry does not depend on the number of
waiting entries.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

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

    def lag(self, policy_version: int) -> int:
        """Policy versions between the oldest token and the given one; 0 without generated
        tokens.
        """
        oldest = self.oldest_version
        return policy_version - oldest if oldest is not None else 0


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
    complete: int = 0
    """Number of complete sessions."""

    def lag(self, policy_version: int) -> int:
        """Policy versions between the oldest token and the given one; 0 without tokens."""
        branches = (held for session in self.sessions.values() for held in session.branches)
        return max((held.lag(policy_version) for held in branches), default=0)


class HeldGroups:
    """All trajectories held by one reader, by entry id and by group and draw."""

    def __init__(self) -> None:
        self._entries: dict[str, HeldTrajectory] = {}
        self._draws: dict[str, dict[int, HeldDraw]] = {}  # by group, and by the step that drew it
        # (oldest version, group, step) of each trajectory, ordered by the next one to drop
        self._ages: list[tuple[int, str, int]] = []

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
        session = draw.sessions.setdefault(one.key.session_id, HeldSession())
        before = bool(session.branches) and session.complete
        session.branches.append(held)
        draw.complete += session.complete - before
        if (oldest := held.oldest_version) is not None:
            heapq.heappush(self._ages, (oldest, one.group_id, one.step))

    def remove(self, entry_id: str) -> None:
        """Removes a trajectory, if present."""
        held = self._entries.pop(entry_id, None)
        if held is None:
            return
        one = held.trajectory
        draw = self._draws[one.group_id][one.step]
        session = draw.sessions[one.key.session_id]
        before = session.complete
        session.branches.remove(held)
        draw.complete += (bool(session.branches) and session.complete) - before
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

    def aged(self, before_version: int, asked: Container[str]) -> Iterator[HeldDraw]:
        """Draws of unrequested groups with a token older than that version. The caller must remove
        them: each is returned once.
        """
        spared = []
        named: set[tuple[str, int]] = set()
        while self._ages and self._ages[0][0] < before_version:
            age = heapq.heappop(self._ages)
            _, group, step = age
            draw = self._draws.get(group, {}).get(step)
            if draw is None:
                continue  # removed since
            if group in asked:
                spared.append(age)
            elif (group, step) not in named:
                named.add((group, step))
                yield draw
        for age in spared:
            heapq.heappush(self._ages, age)
