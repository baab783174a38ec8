"""Agents' sessions from opening to ledger: the owner of each key, and the samples of an ended
session.

Generations are in calls.py, the states of one session in sessions/session.py.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from redis.asyncio import Redis

from paceline.errors import InvalidInput, PacelineError
from paceline.local.patience import deadline
from paceline.rpc import scope_of
from paceline.services.rollout_gateway.background import background, cancel
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.environments import EpisodeTask
from paceline.services.rollout_gateway.sessions import Assignment, FailReason, SessionState
from paceline.services.rollout_gateway.sessions.groups import NO_RUN, OpenGroups, TaskOffers
from paceline.services.rollout_gateway.sessions.names import GatewayNames
from paceline.services.rollout_gateway.sessions.outbox import Outbox
from paceline.services.rollout_gateway.sessions.registry import KEY_PREFIX, Ended, Sessions
from paceline.services.rollout_gateway.sessions.session import Caller, Session
from paceline.streams import NOTED, OpenSessions, api_key_hash
from paceline.telemetry import get_logger
from paceline.trajectory import Trajectory

Fault = FailReason | None
SCORE_GRACE_S = 10.0
RECORD_WAIT_S = 0.25
"""Seconds that the opening of a session waits for its record in Redis. A longer wait would stop
agents while Redis is away.
"""
STOP_GRACE_S = 5.0
log = get_logger(__name__)


class Agents:
    """All sessions of one gateway, and their samples until these are sent."""

    def __init__(
        self, config: GatewayConfig, outbox: Outbox, client: Redis | None, names: GatewayNames
    ) -> None:
        """`client`: the durable Redis; None keeps no records."""
        self._config = config
        self._outbox = outbox
        self.names = names
        self.sessions = Sessions(config.sessions, names=names)
        self.groups = OpenGroups(config.sessions.group_deadline_s, config.max_unsent_bytes)
        self.offers = TaskOffers(self.sessions.open, "" if config.trajectories else NO_RUN)
        self.open_step = 0  # RL step of the agents' own groups
        # set while their hidden rows are captured, by seed
        self.captures: Callable[[int], bool] | None = None
        alone = len(names.addresses) == 1
        self._records = OpenSessions(client, config.run.id, f"{names.number}/", alone=alone)
        self._sweeper: asyncio.Task[None] | None = None
        # samples of an ended session still missing in Redis
        self._unsent: dict[str, int] = {}

    async def start(self) -> None:
        """Reports sessions left open by a killed gateway, then starts the time-outs."""
        try:
            for lost in await self._records.take_lost():
                log.warning("a session of a gateway that was killed", session=lost["session_id"])
                self.sessions.note_ended(_ended_with_gateway(lost))
        except PacelineError as error:
            log.warning("open sessions of a former gateway are not known yet", error=str(error))
        self._records.start()
        self._sweeper = background(self._expire(), "session time-outs")

    async def stop(self) -> None:
        """Records a note for every group that no step has taken."""
        await cancel(self._sweeper)
        for group in self.groups.give_up():
            for session in group.members:
                self.put(session, session.trajectories(), dropped="no_step")

    async def close(self) -> None:
        """Writes the last records."""
        await self._records.stop(STOP_GRACE_S)

    async def open(self, assignment: Assignment) -> Session:
        """Opens a session for an agent. Raises ResourceExhausted when too much is open or
        waiting, FailedPrecondition when another gateway has its group.
        """
        if assignment.open_group and assignment.group_id:
            self.names.require_own(assignment.group_id, group=True)
        captures = self.captures if assignment.trainable else None
        captured = captures is not None and captures(secrets.randbits(63))
        session = self.sessions.open(replace(assignment, capture=captured))
        await self._recorded(session)
        return session

    @contextmanager
    def captured(self, group_id: str, step: int) -> Iterator[Session]:
        """A session for one generation, which is not trained and has its hidden rows captured.
        Raises ResourceExhausted when too much is open.
        """
        about = Assignment(self._config.run.id, step, group_id=group_id, trainable=False)
        session = self.sessions.open(replace(about, implicit=True, capture=True))
        try:
            yield session
        finally:
            session.close()
            self.sessions.remove(session)

    async def claim(
        self,
        wait_s: float | None,
        timeout_s: float = 0.0,
        override: bool | None = None,
        environment: str = "",
    ) -> tuple[Session, EpisodeTask] | None:
        """A task of the run in a session of its own; see TaskOffers.claim.

        A caller that leaves returns its task. Raises FailedPrecondition if no run will ever offer a
        task.
        """
        claimed = await self.offers.claim(wait_s, timeout_s, override, environment)
        if claimed is None:
            return None
        try:
            await self._recorded(claimed[0])
        except BaseException:
            message = "nobody waited for the claimed task"
            self.finish(claimed[0], fail=FailReason.INFRA, message=message)
            raise
        return claimed

    async def caller(self, api_key: str) -> Caller:
        """The caller with this key: a session, or a holder of the gateway's token.

        Raises InvalidInput (UNAUTHENTICATED) for an unknown key, FailedPrecondition for the key of
        an ended session.
        """
        if api_key.startswith(KEY_PREFIX):
            session = self.sessions.by_key(api_key)
            if session is None:
                # nobody has checked the key, so it buys no address where callers need a token
                self.names.require_own(api_key, addressed=not self._config.security.token)
                if lost := await self._records.lost(api_key_hash(api_key)):
                    raise _ended_with_gateway(lost).error()
                raise InvalidInput("the session key is not known here", reason="UNAUTHENTICATED")
            return Caller(session)

        if scope_of(self._config.security, api_key) is None:
            message = "the request carries no token or a wrong one"
            allowed = "a session's key, or the token in tokens/agent of the run's directory"
            raise InvalidInput(message, reason="UNAUTHENTICATED", allowed=allowed)
        return Caller()

    async def complete(self, session: Session) -> None:
        """Completes an agent's session. A claimed task is scored first if it has a rule. Raises
        DeadlineExceeded if the score takes too long.
        """
        session.require_open()
        if self.offers.has_offer(session):
            self.offers.record_completion(session)
            limit_s = self._config.rewards.deadline_s + SCORE_GRACE_S
            async with deadline(limit_s, "the session was not scored in time"):
                await session.ended.wait()
        else:
            self.finish(session)

    def finish(
        self, session: Session, *, abort: bool = False, fail: Fault = None, message: str = ""
    ) -> None:
        """Ends a session. Trainable, scored samples enter the ledger and the stream; all others
        leave a note.
        """
        if not session.close(abort=abort, fail=fail):
            return
        about = session.assignment
        if fail is not None:
            log.warning("session failed", session=session.session_id, reason=fail, message=message)
        self.sessions.remove(session)
        if self.offers.record_end(session):  # the ledger will record the next attempt
            self._records.ended(session.session_id)
        elif not (about.trainable and about.open_group and self._config.trajectories):
            self.put(session, session.trajectories())
        elif not self.groups.add(session):
            self.put(session, session.trajectories(), dropped="late")

    def put(self, session: Session, samples: Sequence[Trajectory], *, dropped: str = "") -> None:
        """Sends the samples of an ended session to ledger and stream; untrained samples leave a
        note.

        `dropped`: the reason that scored samples are not trained either.
        """
        about, final = session.assignment, session.state is SessionState.FINAL
        notes: list[tuple[Trajectory, str]] = []
        for trajectory in samples if about.trainable else ():
            if final and trajectory.reward is not None:
                notes.append((trajectory, dropped))
            elif not about.implicit:
                notes.append((trajectory, "unscored" if final else session.outcome))

        if not notes:
            self._records.ended(session.session_id)
            return
        self._unsent[session.session_id] = self._unsent.get(session.session_id, 0) + len(notes)
        sent = partial(self._sent, session.session_id)
        for trajectory, reason in notes:
            self._outbox.put(trajectory, reason, sent, session.traceparent)

    def _sent(self, session_id: str) -> None:
        """Counts one more sample of a session in Redis; after the last one its record is
        removed.
        """
        self._unsent[session_id] -= 1
        if not self._unsent[session_id]:
            del self._unsent[session_id]
            if session_id not in self.sessions:  # else the record is a later attempt's
                self._records.ended(session_id)

    async def _recorded(self, session: Session) -> None:
        about = session.assignment
        record = {name: getattr(about, name) for name in (*NOTED, "trainable")}
        record |= {"session_id": session.session_id, "group_id": session.group_id}
        record["api_key_hash"] = api_key_hash(session.api_key)
        self._records.opened(session.session_id, record)
        await self._records.wait_written(RECORD_WAIT_S, session.session_id)

    async def _expire(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.sessions.next_expiry_s()):
                    await self.sessions.opened_early.wait()
            self.sessions.opened_early.clear()
            for session in self.sessions.expired():
                log.info("session timed out", session=session.session_id)
                fail = self.offers.fault_of_silence(session)
                self.finish(session, fail=fail, message="silent for too long")


def _ended_with_gateway(record: Mapping[str, Any]) -> Ended:
    """The end of a session that was open when its gateway was killed."""
    hashed_key = record.get("api_key_hash", "")
    return Ended(record["session_id"], SessionState.FAILED, FailReason.INFRA, hashed_key)
