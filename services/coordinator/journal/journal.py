"""Keeps a run's journal in the durable Redis: every event, before its commands are carried out.

Entries are numbered 1, 2, 3, ... and the number is the stream id, so that of two coordinators of
one run only one can append. paceline.report reads them afterwards.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.message import DecodeError
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from coordinator.journal.entry import JournalEntry
from coordinator.journal.records import StepRecords
from coordinator.journal.snapshot import Snapshot, pack_snapshot, unpack_snapshot
from coordinator.machine.state import State
from paceline.errors import DataLoss, FailedPrecondition
from paceline.streams import run_key
from paceline.streams.connection import redis_errors
from paceline.streams.journal_line import pack_entry, unpack_entry
from paceline.v1.coordinator_pb2 import StepRecord

NAME = "journal"
_FIELD = b"entry"
_PAGE = 500


class Journal:
    """Reads all entries once, or those behind the newest snapshot, then appends."""

    def __init__(self, client: Redis, run_id: str) -> None:
        self._client = client
        self._key = run_key(run_id, NAME)
        self._snapshot, self._steps = f"{self._key}:snapshot", f"{self._key}:steps"
        self._count = 0
        self._saved = 0  # entries that the newest snapshot stands for
        self._kept = 0  # records of finished steps that were written with it

    async def newest(self) -> tuple[Snapshot, list[StepRecord]] | None:
        """The newest snapshot and the records of the steps that were finished by then; None where
        there is none. `entries` goes on behind it.

        Raises DataLoss when it does not decode or stands for more than the journal has: then a
        replay of all entries leads to the same.
        """
        with redis_errors(self._client, "reading the snapshot"):
            line: Any = await self._client.get(self._snapshot)
        if line is None:
            return None
        snapshot = unpack_snapshot(line)
        last = f"{snapshot.entries}-0"
        if not await self._range(last, last):
            raise DataLoss("the journal ends before its snapshot", seen=last)
        records = [
            one
            for first in range(0, snapshot.state.step, _PAGE)
            for one in await self._records(range(first, min(first + _PAGE, snapshot.state.step)))
        ]
        self._count = self._saved = snapshot.entries
        self._kept = len(records)
        return snapshot, records

    @property
    def since_snapshot(self) -> int:
        """Entries behind the newest snapshot."""
        return self._count - self._saved

    async def save(
        self,
        state: State,
        records: StepRecords,
        traceparent: str,
        at_s: float,
        watched: tuple[int, float] | None,
    ) -> None:
        """Write a snapshot of what the entries so far have led to; call it when one closed a
        step.
        """
        snapshot = Snapshot(self._count, at_s, traceparent, state, records.carried(), watched)
        # The last one may have been evaluated since.
        first = max(0, self._kept - 1)
        written: Any = {one.step: one.SerializeToString() for one in records.finished[first:]}
        with redis_errors(self._client, "writing the snapshot"):
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.hset(self._steps, mapping=written)
                pipe.set(self._snapshot, pack_snapshot(snapshot))
                await pipe.execute()
        self._saved, self._kept = self._count, len(records.finished)

    async def entries(self) -> AsyncIterator[JournalEntry]:
        """Entries to the last, in pages: from the first on, or behind the snapshot that `newest`
        has returned.

        Raises DataLoss when one is missing or does not decode.
        """
        while page := await self._range(f"({self._count}-0", "+"):
            for entry_id, fields in page:
                if _number(entry_id) != self._count + 1:
                    raise DataLoss(
                        "the journal has a gap", seen=entry_id, allowed=f"{self._count + 1}-0"
                    )
                self._count += 1
                try:
                    entry = JournalEntry.from_json(unpack_entry(fields[_FIELD]))
                except (KeyError, ValueError, RecursionError) as error:
                    raise DataLoss(
                        f"journal entry {self._count} does not decode: {error}"
                    ) from error
                yield entry

    async def append(self, entry: JournalEntry) -> None:
        """Durable when this returns.

        Raises FailedPrecondition when another coordinator has appended meanwhile, Unavailable, and
        ResourceExhausted when Redis is full.
        """
        body = pack_entry(entry.to_json())
        entry_id = f"{self._count + 1}-0"
        with redis_errors(self._client, f"append to {self._key}"):
            try:
                await self._client.xadd(self._key, {_FIELD: body}, id=entry_id)
            except ResponseError as error:
                # A repetition after a lost answer finds its own entry.
                here = await self._range(entry_id, entry_id)
                if not here:
                    raise
                if here[0][1].get(_FIELD) != body:
                    raise FailedPrecondition(
                        f"another coordinator writes the journal {self._key}",
                        reason="JOURNAL_TAKEN",
                        seen=str(error),
                    ) from error

        self._count += 1

    async def _records(self, steps: range) -> list[StepRecord]:
        with redis_errors(self._client, "reading the records of steps"):
            found: Any = await self._client.hmget(self._steps, list(steps))
        try:
            return [StepRecord.FromString(one) for one in found]
        except (DecodeError, TypeError) as error:
            seen = f"steps {steps.start} to {steps.stop - 1}"
            raise DataLoss("the record of a step is gone or damaged", seen=seen) from error

    async def _range(self, first: str, last: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        with redis_errors(self._client, "reading the journal"):
            page: Any = await self._client.xrange(self._key, min=first, max=last, count=_PAGE)
        return list(page)


def _number(entry_id: bytes) -> int:
    return int(entry_id.split(b"-")[0])
