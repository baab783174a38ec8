"""Keeps a run's journal in the durable Redis: every event is durable before its commands run.

Entries are numbered 1, 2, 3, ... and the number is the stream id, so only one of two coordinators
can append. A snapshot moves the entries that it covers into the archive. A replay skips archived
entries; paceline.report reads all entries.
"""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, fields, make_dataclass
from typing import Any, get_type_hints

from google.protobuf.message import DecodeError
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from paceline.errors import DataLoss, FailedPrecondition
from paceline.services.coordinator.journal.entry import VERSION, JournalEntry
from paceline.services.coordinator.journal.groups import KnownGroup
from paceline.services.coordinator.journal.records import Carried
from paceline.services.coordinator.machine import slots
from paceline.services.coordinator.machine.state import State
from paceline.streams import connection, journal, run_key, scripts
from paceline.tagged_json import from_object, to_object
from paceline.v1.coordinator_pb2 import StepRecord


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run after the first `entries` entries of its journal. The last entry closed a step."""

    entries: int
    at_s: float  # of the last entry
    traceparents: dict[str, str]  # of the open steps and of the step just closed
    state: State
    records: Carried
    groups: dict[str, tuple[KnownGroup, ...]]  # ClosedGroups.kept
    watched: tuple[int, float] | None  # AcceptanceWatch.last


_ROWS = {"slots": tuple[tuple[slots.Holder, int], ...], "workers": tuple[slots.WorkerState, ...]}
_OUTSIDE = [one.name for one in fields(Snapshot) if one.name != "state"]
_HINTS = {**get_type_hints(State), **get_type_hints(Snapshot), **_ROWS}
_LINE: Any = make_dataclass("Line", [one for one in _HINTS.items() if one[0] != "state"])
"""A snapshot as JSON: its fields, and the fields of its state with plain rows."""


def pack_snapshot(snapshot: Snapshot) -> bytes:
    """One line of JSON."""
    values = vars(snapshot.state) | {name: getattr(snapshot, name) for name in _OUTSIDE}
    values["slots"] = tuple((slot.holder, slot.epoch) for slot in snapshot.state.slots)
    values["workers"] = tuple(snapshot.state.workers)
    line = {"v": VERSION, **to_object(_LINE(**values))}
    return json.dumps(line, separators=(",", ":")).encode()


def unpack_snapshot(line: bytes) -> Snapshot:
    """Restores a snapshot from `pack_snapshot`'s output. Raises DataLoss for any other input."""
    try:
        values = json.loads(line)
        version = values.pop("v")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataLoss(f"a snapshot does not decode: {error}", seen=line[:80]) from error

    if version != VERSION:
        raise DataLoss("a snapshot has another version", seen=version, allowed=VERSION)
    found = vars(from_object(_LINE, values, "snapshot"))
    outside = {name: found.pop(name) for name in _OUTSIDE}
    found["slots"] = slots.slot_row(slots.Slot(holder, epoch) for holder, epoch in found["slots"])
    found["workers"] = slots.worker_row(found["workers"])
    return Snapshot(state=State(**found), **outside)


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
        self._append = client.register_script(scripts.script("journal"))
        self._save = client.register_script(scripts.script("snapshot"))
        self._key = run_key(run_id, journal.JOURNAL)
        self._archive = run_key(run_id, journal.ARCHIVE)
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
        with connection.redis_errors(self._client, "reading the snapshot"):
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
        while page := await journal.journal_page(self._client, self._run_id, after, last):
            lines += [fields[journal.ENTRY] for _, fields in page]
            after = journal.entry_number(page[-1][0])
        # Since the previous snapshot, its last step may have been evaluated, and rollouts of other
        # steps may have ended.
        first = max(0, self._kept - 1 - snapshot.state.settings.max_policy_lag)
        end = snapshot.state.step
        args: list[Any] = [last, journal.packed(lines), pack_snapshot(snapshot)]
        for one in finished[first:end]:
            args += [one.step, one.SerializeToString()]
        with connection.redis_errors(self._client, "writing the snapshot"):
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
        async for line in journal.journal_lines(self._client, self._run_id, self.count):
            self.count += 1
            try:
                entry = JournalEntry.from_json(journal.unpack_entry(line))
            except (ValueError, RecursionError) as error:
                raise DataLoss(f"journal entry {self.count} does not decode: {error}") from error
            yield entry

    async def append(self, *entries: JournalEntry) -> None:
        """Appends at most TOGETHER entries in one command. On return all are durable; on an error
        none is written.

        Raises FailedPrecondition when another coordinator has appended meanwhile, Unavailable, and
        ResourceExhausted when Redis is full.
        """
        lines = [journal.pack_entry(entry.to_json()) for entry in entries]
        with connection.redis_errors(self._client, f"append to {self._key}"):
            try:
                await self._append(keys=[self._key], args=[self.count + 1, *lines])
            except ResponseError as error:
                if _NOT_NEXT not in str(error):
                    raise
                # A repetition after a lost answer finds its own entries.
                last = self.count + len(lines)
                here = await journal.journal_page(self._client, self._run_id, self.count, last)
                if [fields.get(journal.ENTRY) for _, fields in here] != lines:
                    raise self._taken(error) from error

        self.count += len(lines)

    def _taken(self, error: ResponseError) -> FailedPrecondition:
        message = f"another coordinator writes the journal {self._key}"
        return FailedPrecondition(message, reason="JOURNAL_TAKEN", seen=str(error))

    async def _archived(self, last: int) -> bool:
        """Whether a page of the archive ends with this entry."""
        with connection.redis_errors(self._client, "reading the archive"):
            page: Any = await self._client.xrange(self._archive, f"{last}-0", f"{last}-0")
        return bool(page)

    async def _records(self, steps: range) -> list[StepRecord]:
        with connection.redis_errors(self._client, "reading the records of steps"):
            found: Any = await self._client.hmget(self._steps, list(steps))
        try:
            return [StepRecord.FromString(one) for one in found]
        except (DecodeError, TypeError) as error:
            seen = f"steps {steps.start} to {steps.stop - 1}"
            raise DataLoss("the record of a step is gone or damaged", seen=seen) from error
