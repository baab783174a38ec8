"""Tasks of a run that agents may claim: the present agent of each task, and the number of its
offers.

An attempt that failed because of a machine is offered again. One that failed because of the task is
offered once more; then the failure is the outcome.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paceline.errors import FailedPrecondition, Unavailable
from paceline.services.rollout_gateway.environments.base import EpisodeTask
from paceline.services.rollout_gateway.sessions.assignment import (
    Assignment,
    FailReason,
    SessionState,
)
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
    outcome: asyncio.Future[Session] = field(repr=False)
    failures: Counter[FailReason] = field(default_factory=Counter)


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
        self._waiting: deque[Offer] = deque()
        self._news = asyncio.Event()
        self._stopping = False
        self._led: dict[str, Offer] = {}  # by session id

    @property
    def waiting(self) -> int:
        """Number of unclaimed tasks."""
        return len(self._waiting)

    def offering(self) -> None:
        """Records that a run offers tasks, from now on and between its steps."""
        self._offers_tasks, self._refusal = True, ""

    def refuse(self, refusal: str) -> None:
        """Records the reason that a run offers no tasks; no effect if a run has offered some."""
        if not self._offers_tasks:
            self._refusal = refusal
            self._news.set()

    async def lead(
        self, task: EpisodeTask, assignment: Assignment, session_id: str, worker_index: int
    ) -> Session:
        """Offers the task until an agent has brought it to an end. The session is open if the agent
        completed it.
        """
        offer = Offer(
            task, assignment, session_id, worker_index, asyncio.get_running_loop().create_future()
        )
        self._put(offer)
        try:
            return await offer.outcome
        except asyncio.CancelledError:
            if offer in self._waiting:
                self._waiting.remove(offer)
            self._led.pop(session_id, None)
            raise

    async def claim(
        self, wait_s: float, timeout_s: float = 0.0, override: bool | None = None
    ) -> tuple[Session, EpisodeTask] | None:
        """The task that has waited longest, in a session of its own; None if none arrives within
        the wait.

        `timeout_s`: of silence; 0 is the gateway's setting. `override`: see Assignment; None uses
        the task's. Raises FailedPrecondition (NO_TASKS_OFFERED) if no task will arrive, Unavailable
        while the gateway stops.
        """
        try:
            async with asyncio.timeout(wait_s):
                while not self._waiting:
                    if self._stopping:
                        raise Unavailable("the gateway is stopping")
                    if self._refusal:
                        raise FailedPrecondition(self._refusal, reason="NO_TASKS_OFFERED")
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return None

        offer = self._waiting.popleft()
        try:
            about = replace(offer.assignment, timeout_s=timeout_s)
            if override is not None:
                about = replace(about, override=override)
            session = self._open(about, offer.session_id)
        except BaseException:
            self._waiting.appendleft(offer)
            raise

        session.worker_index = offer.worker_index
        self._led[offer.session_id] = offer
        return session, offer.task

    def stop(self) -> None:
        """Ends every wait for a task with a refusal."""
        self._stopping = True
        self._news.set()

    def leads(self, session: Session) -> bool:
        """Whether the open session answers an offer, which then decides about the session's end."""
        return session.session_id in self._led

    def completed(self, session: Session) -> None:
        """Records that the agent is done; the session stays open until it is scored."""
        offer = self._led.get(session.session_id)
        if offer is not None and not offer.outcome.done():
            offer.outcome.set_result(session)

    def ended(self, session: Session) -> bool:
        """Records the end of a session. Returns True if the task is offered again after a fault,
        False if the end is its outcome.
        """
        offer = self._led.pop(session.session_id, None)
        if offer is None or offer.outcome.done():
            return False
        if session.state is SessionState.FAILED and session.fail_reason is not None:
            reason = session.fail_reason
            offer.failures[reason] += 1
            log.info(
                "attempt failed",
                task=offer.task.task_id,
                reason=reason,
                failures=offer.failures[reason],
            )
            if offer.failures[reason] < ATTEMPTS[reason]:
                self._put(offer)
                return True

        offer.outcome.set_result(session)
        return False

    def _put(self, offer: Offer) -> None:
        self._waiting.append(offer)
        self._news.set()
