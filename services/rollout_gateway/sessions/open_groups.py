"""Groups opened by agents, from the first sibling's end until a step takes them.

The module decides which groups are closed. Groups are bounded in bytes: above the limit, no new
session is admitted until a step takes groups.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from paceline.errors import ResourceExhausted
from paceline.services.rollout_gateway.sessions.assignment import SessionState
from paceline.services.rollout_gateway.sessions.session import Session
from paceline.trajectory import Trajectory

TOKEN_BYTES = 64
"""Bytes per token of a sample in memory: ids, mask and log-probs as Python numbers."""
CLOSED_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Member:
    """An ended session."""

    session: Session = field(repr=False)
    samples: tuple[Trajectory, ...] = field(repr=False)

    @property
    def scored(self) -> bool:
        """Whether it can be trained."""
        return self.session.state is SessionState.FINAL and any(
            one.reward is not None for one in self.samples
        )


@dataclass(eq=False, slots=True)
class OpenGroup:
    """Ended siblings."""

    group_id: str
    size: int
    members: list[Member] = field(default_factory=list)
    alarm: asyncio.TimerHandle | None = None

    @property
    def scored(self) -> int:
        """Number of trainable sessions."""
        return sum(member.scored for member in self.members)


class OpenGroups:
    """Open groups, for use on one event loop."""

    def __init__(self, deadline_s: float, max_bytes: int) -> None:
        self._deadline_s = deadline_s
        self._max_bytes = max_bytes
        self._bytes = 0
        self._gathering: dict[str, OpenGroup] = {}
        self._closed: OrderedDict[str, OpenGroup] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._news = asyncio.Event()
        self._listeners: set[asyncio.Event] = set()

    @property
    def gathering(self) -> int:
        """Number of groups that wait for siblings."""
        return len(self._gathering)

    def admit(self) -> None:
        """Raises ResourceExhausted while too much waits for a step."""
        if self._bytes > self._max_bytes:
            raise ResourceExhausted(
                "finished sessions wait for a training step; new ones are refused until one has "
                "taken them",
                seen=f"{self._bytes} bytes",
                allowed=f"{self._max_bytes} bytes",
            )

    def add(self, session: Session) -> bool:
        """Adds an ended session.

        Returns False if its group is full or taken by a step: it is too late.
        """
        about = session.assignment
        group_id = session.group_id
        if group_id in self._gone:
            return False
        group = self._gathering.get(group_id) or self._closed.get(group_id)
        if group is None:
            group = self._gathering[group_id] = OpenGroup(group_id, about.group_size)
            loop = asyncio.get_running_loop()
            group.alarm = loop.call_later(self._deadline_s, self._close, group)

        if len(group.members) >= group.size:
            return False
        member = Member(session, tuple(session.trajectories()))
        group.members.append(member)
        self._bytes += _size(member)
        if len(group.members) >= group.size:
            self._close(group)
        return True

    async def closed(self) -> None:
        """Returns once there is a group for `pop`."""
        while not self._closed:
            self._news.clear()
            await self._news.wait()

    async def waiting(self) -> AsyncGenerator[int]:
        """Number of groups for `pop`: at once if there are any, then whenever another
        group closes.
        """
        more = asyncio.Event()
        self._listeners.add(more)
        try:
            if self._closed:
                more.set()
            while True:
                await more.wait()
                more.clear()
                yield len(self._closed)
        finally:
            self._listeners.discard(more)

    def pop(self) -> OpenGroup | None:
        """The group that closed first; None without one."""
        if not self._closed:
            return None
        group_id, group = self._closed.popitem(last=False)
        self._bytes -= sum(_size(member) for member in group.members)
        self._gone[group_id] = None
        if len(self._gone) > CLOSED_REMEMBERED:
            self._gone.popitem(last=False)
        return group

    def give_up(self) -> list[OpenGroup]:
        """All groups not taken by a step, at the end of the process."""
        groups = [*self._closed.values(), *self._gathering.values()]
        for group in groups:
            if group.alarm is not None:
                group.alarm.cancel()
        self._closed.clear()
        self._gathering.clear()
        self._bytes = 0
        return groups

    def _close(self, group: OpenGroup) -> None:
        if self._gathering.pop(group.group_id, None) is None:
            return
        if group.alarm is not None:
            group.alarm.cancel()
        self._closed[group.group_id] = group
        for more in (self._news, *self._listeners):
            more.set()


def _size(member: Member) -> int:
    return sum(len(one.token_ids) for one in member.samples) * TOKEN_BYTES
