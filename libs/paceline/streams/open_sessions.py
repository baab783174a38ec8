"""Records of open sessions on the durable Redis, so that a killed gateway loses no session
silently.

The records cover open and lost sessions, without their tokens. A killed process loses the tokens,
and the record names the session. The ledger decides about final branches.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

import redis.asyncio

from paceline.errors import InvalidInput, PacelineError
from paceline.streams import connection, ledger, scripts
from paceline.telemetry import get_logger
from paceline.trajectory import BranchKey

LOST_REASON = "failed:infra"
LOST_KEPT = 4096
LOST_KEPT_S = 24 * 3600
"""Seconds that a lost session is kept after the last start of a gateway: at most twice as long in
all.
"""
BRANCHES_LOOKED_AT = 64
"""A session has ended if one of its first branches is in the ledger. The very first branch may have
had no tokens.
"""
MAX_RECORD_BYTES = 16 << 10
BATCH = 256
RETRY_S = 0.25
log = get_logger(__name__)


def api_key_hash(api_key: str) -> str:
    """sha256 of a session's API key, hex: the key itself is never stored."""
    return hashlib.sha256(api_key.encode("utf-8", "surrogatepass")).hexdigest()


class OpenSessions:
    """Open sessions of one run. Putting never waits: one task writes in order and retries while
    Redis is away.

    Only the last state of a session waits. A session that opened and ended before its first write
    is not written at all. So the waiting records are bounded by the open sessions and the sessions
    in Redis. `client` None keeps nothing.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis | None,
        run_id: str,
        writer: str = "",
        *,
        alone: bool = True,
    ) -> None:
        """`writer`: prefix of the marks of this writer's processes. `alone`: no other writer shares
        the run.
        """
        self._writer = "" if alone else writer
        self._client: Any = client
        self._run_id = run_id
        # mark of this process; a record with another mark was left open by an earlier process
        self._mark = writer + uuid.uuid4().hex
        names = ("open", "lost", "lost:keys", "lost:at")
        self._open, self._lost, self._lost_keys, self._lost_at = (
            connection.run_key(run_id, f"sessions:{name}") for name in names
        )
        self._ledger = connection.run_key(run_id, "ledger")
        self._take: Any = (
            None if client is None else client.register_script(scripts.script("note", "take_lost"))
        )
        self._waiting: dict[str, str | None] = {}  # session -> value to set; None: to remove
        self._written: set[str] = set()  # sessions that are or may be in Redis
        self._turn = asyncio.Event()  # set and replaced after every write
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the writing task."""
        if self._client is not None:
            self._task = asyncio.create_task(self._run(), name="open sessions")
            self._task.add_done_callback(_log_failure)

    async def stop(self, grace_s: float) -> None:
        """Writes waiting records for up to `grace_s` seconds. Sessions still open count as lost for
        the next process, which is also recorded.
        """
        if self._task is None:
            return
        if not await self.wait_written(grace_s):
            log.error("open sessions were not written before the stop", sessions=len(self._waiting))
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def wait_written(self, deadline_s: float, session_id: str = "") -> bool:
        """True once Redis has the last state of a session, "" for all sessions; False if that takes
        longer than the deadline.

        A caller that answers only after this call leaves no instant in which a kill could lose the
        session silently.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self._waits(session_id):
                    await self._turn.wait()
        return not self._waits(session_id)

    def _waits(self, session_id: str) -> bool:
        return session_id in self._waiting if session_id else bool(self._waiting)

    def opened(self, session_id: str, record: Mapping[str, Any]) -> None:
        """Records an open session. A session with `trainable` false in its record is not kept.

        `record`: JSON values. They include api_key_hash (see `api_key_hash`; optional) and the
        fields for the ledger: step, task_id, group_id, group_size, task_index and sample_index.
        Raises InvalidInput.
        """
        if self._client is None or not record.get("trainable", True):
            return
        self._put(session_id, self._value(session_id, record))

    def ended(self, session_id: str) -> None:
        """Removes an open session; unknown ids are ignored.

        Call it when the session's branches are in Redis, not before.
        """
        if session_id in self._written:
            self._put(session_id, None)
        else:
            self._waiting.pop(session_id, None)

    async def take_lost(self) -> list[dict[str, Any]]:
        """Marks sessions left open by earlier processes as lost, in one step, and returns their
        records. Call it at the start.

        A session with a branch in the ledger had ended and is only removed. For every other one the
        ledger gets a note, not final, with reason "failed:infra". Only one process per writer may
        be alive: sessions opened by another live process count as lost too. Raises Unavailable
        while Redis is away; a later call has the same effect.
        """
        if self._take is None:
            return []
        keys = [self._open, self._ledger, self._lost, self._lost_keys, self._lost_at]
        keys += [f"{self._ledger}:totals", f"{self._ledger}:steps"]
        limits = [LOST_KEPT_S, LOST_KEPT, BRANCHES_LOOKED_AT]
        args = [self._mark, time.time(), *limits, self._writer]
        with connection.redis_errors(self._client, "take over lost sessions"):
            taken = await self._take(keys=keys, args=args)
        return [json.loads(record) for record in taken]

    async def lost(self, key_hash: str) -> dict[str, Any] | None:
        """The record of a lost session by the hash of its API key; None if there is none."""
        if self._client is None:
            return None
        with connection.redis_errors(self._client, "look for a lost session"):
            session_id = await self._client.hget(self._lost_keys, key_hash)
            value = session_id and await self._client.hget(self._lost, session_id)
        return json.loads(value.split(b"\n", 2)[2]) if value else None

    def _value(self, session_id: str, record: Mapping[str, Any]) -> str:
        """Four lines, see lua/take_lost.lua; the JSON written here has no line breaks."""
        kept = {**record, "session_id": session_id, "opened_at_s": time.time()}
        note = {name: record[name] for name in ledger.NOTED if name in record}
        note |= {"key": str(BranchKey(self._run_id, session_id, "0")), "reward": None, "tokens": 0}
        note |= {"final": False, "reason": LOST_REASON, "at_s": kept["opened_at_s"]}
        try:
            key_hash = record.get("api_key_hash", "")
            texts = [json.dumps(one, allow_nan=False) for one in (note, kept)]
            value = "\n".join((self._mark, key_hash, *texts))
        except (TypeError, ValueError) as error:
            message = f"the record of session {session_id} is not JSON: {error}"
            raise InvalidInput(message) from error

        if len(value) > MAX_RECORD_BYTES:
            message = "the record of a session is too long"
            raise InvalidInput(message, seen=len(value), allowed=MAX_RECORD_BYTES)

        return value

    def _put(self, session_id: str, value: str | None) -> None:
        self._waiting[session_id] = value
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            batch = dict(itertools.islice(self._waiting.items(), BATCH))
            if await self._write(batch):
                for session_id, value in batch.items():
                    if self._waiting[session_id] is value:  # else a later state waits
                        del self._waiting[session_id]
            else:
                await asyncio.sleep(RETRY_S)
            if not self._waiting:
                self._wake.clear()
            turn, self._turn = self._turn, asyncio.Event()
            turn.set()

    async def _write(self, batch: Mapping[str, str | None]) -> bool:
        values = {session_id: value for session_id, value in batch.items() if value is not None}
        gone = [session_id for session_id, value in batch.items() if value is None]
        self._written.update(values)
        try:
            with connection.redis_errors(self._client, "write open sessions"):
                async with self._client.pipeline(transaction=True) as pipe:
                    if values:
                        pipe.hset(self._open, mapping=values)
                    if gone:
                        pipe.hdel(self._open, *gone)
                    await pipe.execute()
        except PacelineError as error:
            log.warning(
                "open sessions not written; they are tried again",
                sessions=len(batch),
                error=str(error),
            )
            return False

        self._written.difference_update(gone)
        return True


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("open sessions are written no more", exc_info=task.exception())
