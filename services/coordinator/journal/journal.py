"""Keeps a run's journal in the durable Redis: every event is durable before its commands run.

Entries are numbered 1, 2, 3, ... and the number is the stream id, so only one of two coordinators
can append. A snapshot moves the entries that it covers into the archive. A replay skips archived
entries; paceline.report reads all entries.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from google.protobuf.message import DecodeError
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from paceline.errors import DataLoss, FailedPrecondition
from paceline.services.coordinator.journal.entry import JournalEntry
from paceline.services.coordinator.journal.snapshot import Snapshot, pack_snapshot, unpack_snapshot
from paceline.streams import run_key, scripts
from paceline.streams.connection import redis_errors
from paceline.streams.journal_line import pack_entry, unpack_entry
from paceline.streams.journal_pages import (
    ARCHIVE,
    ENTRY,
    JOURNAL,
    entry_number,
    journal_lines,
    journal_page,
    packed,
)
from paceline.v1.coordinator_pb2 import StepRecord

TOGETHER = 256
"""Most entries of one append: some 50 KB, for which Redis serves no other client."""
_PAGE = 500
_NOT_NEXT = "equal or smaller"
"""Part of Redis' error for a stream id already in use."""


class Journal:
    """Reads all entries once, or the entries after the newest snapshot; then appends."""

    def __init__(self, client: Redis, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._append = client.register_script(scripts.JOURNAL)
        self._save = client.register_script(scripts.SNAPSHOT)
        self._key, self._archive = run_key(run_id, JOURNAL), run_key(run_id, ARCHIVE)
        self._snapshot, self._steps = f"{self._key}:snapshot", f"{self._key}:steps"
        self.count = 0
        """Number of entries read or written."""
        self._saved = 0  # entries covered by the newest snapshot
        self._kept = 0  # records of finished steps written with it

    async def newest(self) -> tuple[Snapshot, list[StepRecord]] | None:
        """The newest snapshot and the records of the steps finished by then; None without one.
        `entries` continues after it.

        Raises DataLoss when the snapshot is undecodable or covers more than the archive has. A
        replay of all entries then leads to the same state.
        """
        with redis_errors(self._client, "reading the snapshot"):
            line: Any = await self._client.get(self._snapshot)
        if line is None:
            return None
        snapshot = unpack_snapshot(line)
        if not await self._archived(snapshot.entries):
            raise DataLoss("the archive ends before the snapshot", seen=snapshot.entries)
        records = [
            one
            for first in range(0, snapshot.state.step, _PAGE)
            for one in await self._records(range(first, min(first + _PAGE, snapshot.state.step)))
        ]
        self.count = self._saved = snapshot.entries
        self._kept = len(records)
        return snapshot, records

    @property
    def since_snapshot(self) -> int:
        """Number of entries after the newest snapshot."""
        return self.count - self._saved

    async def save(self, snapshot: Snapshot, finished: Sequence[StepRecord]) -> None:
        """Writes a snapshot with the records of the steps finished by then, and archives the
        covered entries, all or nothing. Raises as `append`.

        Later entries may already have amended the last record.
        """
        lines: list[bytes] = []
        after, last = 0, snapshot.entries
        while page := await journal_page(self._client, self._run_id, after, last):
            lines += [fields[ENTRY] for _, fields in page]
            after = entry_number(page[-1][0])
        # Since the previous snapshot, its last step may have been evaluated, and rollouts of other
        # steps may have ended.
        first = max(0, self._kept - 1 - snapshot.state.settings.max_policy_lag)
        end = snapshot.state.step
        args: list[Any] = [last, packed(lines), pack_snapshot(snapshot)]
        for one in finished[first:end]:
            args += [one.step, one.SerializeToString()]
        with redis_errors(self._client, "writing the snapshot"):
            try:
                keys = [self._key, self._archive, self._snapshot, self._steps]
                await self._save(keys=keys, args=args)
            except ResponseError as error:
                if _NOT_NEXT not in str(error):
                    raise
                if not await self._archived(last):  # otherwise only the answer was lost
                    raise self._taken(error) from error
        self._saved, self._kept = last, end

    async def entries(self) -> AsyncIterator[JournalEntry]:
        """Entries up to the last, in pages: from the first, or after the snapshot returned by
        `newest`.

        Raises DataLoss when an entry is missing or undecodable.
        """
        async for line in journal_lines(self._client, self._run_id, self.count):
            self.count += 1
            try:
                entry = JournalEntry.from_json(unpack_entry(line))
            except (ValueError, RecursionError) as error:
                raise DataLoss(f"journal entry {self.count} does not decode: {error}") from error
            yield entry

    async def append(self, *entries: JournalEntry) -> None:
        """Appends at most TOGETHER entries in one command. On return all are durable; on an error
        none is written.

        Raises FailedPrecondition when another coordinator has appended meanwhile, Unavailable, and
        ResourceExhausted when Redis is full.
        """
        lines = [pack_entry(entry.to_json()) for entry in entries]
        with redis_errors(self._client, f"append to {self._key}"):
            try:
                await self._append(keys=[self._key], args=[self.count + 1, *lines])
            except ResponseError as error:
                if _NOT_NEXT not in str(error):
                    raise
                # A repetition after a lost answer finds its own entries.
                last = self.count + len(lines)
                here = await journal_page(self._client, self._run_id, self.count, last)
                if [fields.get(ENTRY) for _, fields in here] != lines:
                    raise self._taken(error) from error

        self.count += len(lines)

    def _taken(self, error: ResponseError) -> FailedPrecondition:
        message = f"another coordinator writes the journal {self._key}"
        return FailedPrecondition(message, reason="JOURNAL_TAKEN", seen=str(error))

    async def _archived(self, last: int) -> bool:
        """Whether a page of the archive ends with this entry."""
        with redis_errors(self._client, "reading the archive"):
            page: Any = await self._client.xrange(self._archive, f"{last}-0", f"{last}-0")
        return bool(page)

    async def _records(self, steps: range) -> list[StepRecord]:
        with redis_errors(self._client, "reading the records of steps"):
            found: Any = await self._client.hmget(self._steps, list(steps))
        try:
            return [StepRecord.FromString(one) for one in found]
        except (DecodeError, TypeError) as error:
            seen = f"steps {steps.start} to {steps.stop - 1}"
            raise DataLoss("the record of a step is gone or damaged", seen=seen) from error
