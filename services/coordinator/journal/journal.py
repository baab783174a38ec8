"""Keeps a run's journal in the durable Redis: every event, before its commands are carried out.

Entries are numbered 1, 2, 3, ... and the number is the stream id, so that of two coordinators of
one run only one can append. paceline.report reads them afterwards.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from coordinator.journal.entry import JournalEntry
from paceline.errors import DataLoss, FailedPrecondition
from paceline.streams import run_key
from paceline.streams.connection import redis_errors
from paceline.streams.journal_line import pack_entry, unpack_entry

NAME = "journal"
_FIELD = b"entry"
_PAGE = 500


class Journal:
    """Reads all entries once, then appends."""

    def __init__(self, client: Redis, run_id: str) -> None:
        self._client = client
        self._key = run_key(run_id, NAME)
        self._count = 0

    async def entries(self) -> AsyncIterator[JournalEntry]:
        """Entries from the first to the last, in pages.

        Raises DataLoss when one is missing or does not decode.
        """
        self._count = 0
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

    async def _range(self, first: str, last: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        with redis_errors(self._client, "reading the journal"):
            page: Any = await self._client.xrange(self._key, min=first, max=last, count=_PAGE)
        return list(page)


def _number(entry_id: bytes) -> int:
    return int(entry_id.split(b"-")[0])
