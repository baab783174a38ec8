"""Finished branches on their way to the durable Redis; the ledger itself is in Redis.

Putting never waits. Waiting branches are counted in bytes, and no new work is admitted above a
limit. Memory is therefore bounded by that limit plus running work. Redis may be away for any time:
nothing is lost while this process lives.
"""

import asyncio
import functools
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from paceline.errors import PacelineError, ResourceExhausted
from paceline.services.rollout_gateway.background import background, cancel
from paceline.streams import Ledger, encode_trajectory
from paceline.telemetry import extract, get_logger, inject, names, span
from paceline.trajectory import Trajectory

BATCH = 16
RETRY_S = 0.25
LEDGERS_KEPT = 16
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Parcel:
    trajectory: Trajectory = field(repr=False)
    unpublished: str  # reason that it never enters the stream; empty if it does
    fields: dict[str, str]
    payload: bytes = field(repr=False)
    sent: Callable[[], None] = field(repr=False)  # called when Redis has it
    session: str  # traceparent of its session's span; empty without one


class Outbox:
    """Sends branches in order of their end, a few at a time.

    `client` None: nothing is kept (no Redis configured).
    """

    def __init__(self, client: Redis | None, max_unsent_bytes: int) -> None:
        self._client: Any = client
        self._max_unsent_bytes = max_unsent_bytes
        self._parcels: deque[_Parcel] = deque()
        self.unsent_bytes = 0
        """Bytes put and not yet acknowledged by Redis."""
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._ledger = functools.lru_cache(LEDGERS_KEPT)(
            lambda run_id: Ledger(self._client, run_id)
        )
        self._task: asyncio.Task[None] | None = None

    def admit(self) -> None:
        """Raises ResourceExhausted while more bytes wait than permitted."""
        if self.unsent_bytes > self._max_unsent_bytes:
            message = "trajectories wait for Redis; new work is refused until they are sent"
            seen, allowed = f"{self.unsent_bytes} bytes", f"{self._max_unsent_bytes} bytes"
            raise ResourceExhausted(message, seen=seen, allowed=allowed)

    def start(self) -> None:
        """Starts sending."""
        if self._client is not None:
            self._task = background(self._run(), "outbox")

    async def stop(self, grace_s: float) -> None:
        """Sends waiting branches for up to `grace_s` seconds, then logs the unsent ones."""
        if self._task is None:
            return
        try:
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        except TimeoutError:
            log.error("branches were not sent before the stop", bytes=self.unsent_bytes)
        await cancel(self._task)

    def put(
        self, trajectory: Trajectory, unpublished: str, sent: Callable[[], None], session: str
    ) -> None:
        """Queues a finished branch. `unpublished`: the reason that it only gets a note in the
        ledger; empty if it enters the stream.

        `sent` is called when Redis has it, or at once if nothing is kept. `session` is the
        traceparent that the append links.
        """
        if self._client is None:
            sent()
            return
        fields, payload = encode_trajectory(trajectory)
        self._parcels.append(_Parcel(trajectory, unpublished, fields, payload, sent, session))
        self.unsent_bytes += len(payload)
        self._empty.clear()
        self._wake.set()

    async def finals(self, run_id: str, step: int) -> dict[str, list[dict[str, Any]]]:
        """Ledger records of a step's final branches by session; empty without Redis."""
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        if self._client is not None:
            for record in await self._ledger(run_id).finals(step):
                found[record["key"].rpartition("/")[0]].append(record)
        return found

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._parcels:
                batch = [self._parcels.popleft() for _ in range(min(BATCH, len(self._parcels)))]
                sent = await asyncio.gather(*(self._send(parcel) for parcel in batch))
                for parcel, done in zip(reversed(batch), reversed(sent), strict=True):
                    if done:
                        self.unsent_bytes -= len(parcel.payload)
                    else:
                        self._parcels.appendleft(parcel)
                if not all(sent):
                    await asyncio.sleep(RETRY_S)
            self._empty.set()

    async def _send(self, parcel: _Parcel) -> bool:
        trajectory, branch = parcel.trajectory, str(parcel.trajectory.key)
        try:
            ledger, links = self._ledger(trajectory.key.run_id), [parcel.session]
            about = {names.MESSAGING_SYSTEM: "redis", names.BRANCH: branch}
            parent = extract(parcel.fields)
            with span(names.TRAJECTORY_APPEND, about, kind="producer", parent=parent, links=links):
                if parcel.unpublished:
                    await ledger.record_unpublished(trajectory, parcel.unpublished)
                else:
                    fields = {**parcel.fields, **inject()}
                    await ledger.append_final(trajectory, fields, parcel.payload)
        except PacelineError as error:
            log.warning("branch not sent; it is tried again", branch=branch, error=str(error))
            return False

        parcel.sent()
        return True
