"""Tasks that agents may claim, and groups that agents opened, until a step takes them.

An attempt that failed because of a machine is offered again. One that failed because of the task is
offered once more; then the failure is the outcome.

The module decides which groups are closed. Groups are bounded in bytes: above the limit, no new
session is admitted until a step takes groups.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

from paceline.errors import FailedPrecondition, ResourceExhausted, Unavailable
from paceline.services.rollout_gateway.environments import EpisodeTask
from paceline.services.rollout_gateway.sessions import Assignment, FailReason, SessionState
from paceline.services.rollout_gateway.sessions.session import Session
from paceline.telemetry import get_logger

ATTEMPTS = {FailReason.INFRA: 4, FailReason.DATA: 2}
NO_RUN = "no run uses this gateway, so that nobody offers it tasks"
"""Refusal of a gateway that keeps no trajectories, so that a coordinator could not train
on them.
"""
log = get_logger(__name__)
Open = Callable[[Assignment, str], Session]


@dataclass(eq=False)
class Offer:
    """A task on offer or in progress."""

    task: EpisodeTask
    assignment: Assignment
    session_id: str
    worker_index: int
    environment: str = ""  # that leads the session; empty: an agent
    failures: Counter[FailReason] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.outcome: asyncio.Future[Session] = asyncio.get_running_loop().create_future()


class TaskOffers:
    """Offers of one gateway. `open_session` opens a session under a given id.

    Without offers a claim waits, unless there certainly will be none: then it is refused. A run
    that has not begun may still offer tasks.
    """

    def __init__(self, open_session: Open, refusal: str = "") -> None:
        """`refusal`: the reason that there will be no offers, if known."""
        self._open = open_session
        self._refusal = refusal
        self._offers_tasks = False
        self.waiting: deque[Offer] = deque()  # unclaimed
        self._news = asyncio.Event()
        self._stopping = False
        self._claimed: dict[str, Offer] = {}  # by session id

    def record_offers(self) -> None:
        """Records that a run offers tasks, from now on and between its steps."""
        self._offers_tasks, self._refusal = True, ""

    def refuse(self, refusal: str) -> None:
        """Records the reason that a run offers no tasks; no effect if a run has offered some."""
        if not self._offers_tasks:
            self._refusal = refusal
            self._news.set()

    async def offer_task(self, offer: Offer) -> Session:
        """Offers the task until an agent has brought it to an end. The session is open if the agent
        completed it.
        """
        self._put(offer)
        try:
            return await offer.outcome
        except asyncio.CancelledError:
            if offer in self.waiting:
                self.waiting.remove(offer)
            self._claimed.pop(offer.session_id, None)
            raise

    async def claim(
        self,
        wait_s: float | None,
        timeout_s: float = 0.0,
        override: bool | None = None,
        environment: str = "",
    ) -> tuple[Session, EpisodeTask] | None:
        """The task of agents or of an environment that has waited longest, in a session of its own;
        None if none arrives within the wait. A wait of None has no end.

        `timeout_s`: of silence; 0 is the task's. `override`: see Assignment; None uses the task's.
        Raises FailedPrecondition (NO_TASKS_OFFERED) if no task will arrive, Unavailable while the
        gateway stops.
        """
        try:
            async with asyncio.timeout(wait_s):
                while (offer := self._first(environment)) is None:
                    if self._stopping:
                        raise Unavailable("the gateway is stopping")
                    if self._refusal and not environment:
                        raise FailedPrecondition(self._refusal, reason="NO_TASKS_OFFERED")
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return None

        self.waiting.remove(offer)
        try:
            about = offer.assignment
            overrides, silence_s = about.override if override is None else override, about.timeout_s
            about = replace(about, timeout_s=timeout_s or silence_s, override=overrides)
            session = self._open(about, offer.session_id)
        except BaseException:
            self.waiting.appendleft(offer)
            raise

        session.worker_index = offer.worker_index
        self._claimed[offer.session_id] = offer
        return session, offer.task

    def stop(self) -> None:
        """Ends every wait for a task with a refusal."""
        self._stopping = True
        self._news.set()

    def has_offer(self, session: Session) -> bool:
        """Whether the open session answers an offer, which then decides about the session's end."""
        return session.session_id in self._claimed

    def fault_of_silence(self, session: Session) -> FailReason | None:
        """The reason of a silent session's failure: its agent's machine, or the environment of the
        task; None for a session without an offer, which ends as completed.
        """
        offer = self._claimed.get(session.session_id)
        if offer is None:
            return None
        return FailReason.DATA if offer.environment else FailReason.INFRA

    def siblings(self, group_id: str) -> int:
        """Number of a group's samples that wait or run."""
        offers = (*self.waiting, *self._claimed.values())
        return sum(one.assignment.group_id == group_id for one in offers)

    def _first(self, environment: str) -> Offer | None:
        return next((one for one in self.waiting if one.environment == environment), None)

    def record_completion(self, session: Session) -> None:
        """Records that the agent is done; the session stays open until it is scored."""
        offer = self._claimed.get(session.session_id)
        if offer is not None and not offer.outcome.done():
            offer.outcome.set_result(session)

    def record_end(self, session: Session) -> bool:
        """Records the end of a session. Returns True if the task is offered again after a fault,
        False if the end is its outcome.
        """
        offer = self._claimed.pop(session.session_id, None)
        if offer is None or offer.outcome.done():
            return False
        if session.state is SessionState.FAILED and session.fail_reason is not None:
            reason = session.fail_reason
            offer.failures[reason] += 1
            failures = offer.failures[reason]
            log.info("attempt failed", task=offer.task.task_id, reason=reason, failures=failures)
            if failures < ATTEMPTS[reason]:
                self._put(offer)
                return True

        offer.outcome.set_result(session)
        return False

    def _put(self, offer: Offer) -> None:
        self.waiting.append(offer)
        self._news.set()


TOKEN_BYTES = 64
"""Bytes per token of a sample in memory: ids, mask and log-probs as Python numbers."""
CLOSED_REMEMBERED = 4096


@dataclass(eq=False, slots=True)
class OpenGroup:
    """Ended siblings."""

    group_id: str
    size: int
    alarm: asyncio.TimerHandle  # rings at the group's deadline
    members: list[Session] = field(default_factory=list)

    @property
    def scored(self) -> int:
        """Number of trainable sessions."""
        final = [one for one in self.members if one.state is SessionState.FINAL]
        return sum(any(own.reward is not None for own in one.trajectories()) for one in final)


class OpenGroups:
    """Open groups, for use on one event loop."""

    def __init__(self, deadline_s: float, max_bytes: int) -> None:
        self._deadline_s = deadline_s
        self._max_bytes = max_bytes
        self._bytes = 0
        self.gathering: dict[str, OpenGroup] = {}  # groups that wait for siblings
        self._closed: OrderedDict[str, OpenGroup] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._close_event = asyncio.Event()  # of the next group; replaced when it is set

    def admit(self) -> None:
        """Raises ResourceExhausted while too much waits for a step."""
        if self._bytes > self._max_bytes:
            message = "finished sessions wait for a training step, which new sessions have to await"
            seen, allowed = f"{self._bytes} bytes", f"{self._max_bytes} bytes"
            raise ResourceExhausted(message, seen=seen, allowed=allowed)

    def add(self, session: Session) -> bool:
        """Adds an ended session.

        Returns False if its group is full or taken by a step: it is too late.
        """
        about = session.assignment
        group_id = session.group_id
        if group_id in self._gone:
            return False
        group = self.gathering.get(group_id) or self._closed.get(group_id)
        if group is None:
            loop = asyncio.get_running_loop()
            alarm = loop.call_later(self._deadline_s, self._close, group_id)
            group = self.gathering[group_id] = OpenGroup(group_id, about.group_size, alarm)

        if len(group.members) >= group.size:
            return False
        group.members.append(session)
        self._bytes += _size(session)
        if len(group.members) >= group.size:
            self._close(group_id)
        return True

    async def closed(self) -> None:
        """Returns once there is a group for `pop`."""
        while not self._closed:
            await self._close_event.wait()

    async def waiting(self) -> AsyncGenerator[int]:
        """Number of groups for `pop`: at once if there are any, then whenever another
        group closes.
        """
        while True:
            more = self._close_event
            if self._closed:
                yield len(self._closed)
            await more.wait()

    def pop(self) -> OpenGroup | None:
        """The group that closed first; None without one."""
        if not self._closed:
            return None
        group_id, group = self._closed.popitem(last=False)
        self._bytes -= sum(map(_size, group.members))
        self._gone[group_id] = None
        if len(self._gone) > CLOSED_REMEMBERED:
            self._gone.popitem(last=False)
        return group

    def give_up(self) -> list[OpenGroup]:
        """All groups not taken by a step, at the end of the process."""
        groups = [*self._closed.values(), *self.gathering.values()]
        for group in groups:
            group.alarm.cancel()
        self._closed.clear()
        self.gathering.clear()
        self._bytes = 0
        return groups

    def _close(self, group_id: str) -> None:
        group = self.gathering.pop(group_id, None)
        if group is None:
            return
        group.alarm.cancel()
        self._closed[group_id] = group
        self._close_event.set()
        self._close_event = asyncio.Event()


def _size(session: Session) -> int:
    return sum(len(one.token_ids) for one in session.trajectories()) * TOKEN_BYTES
