"""The run's journal in the durable Redis: every event, appended before its commands are executed.

Owns order and form of the entries, not their meaning (machine.py) and not their evaluation
(paceline.report). Entries are numbered 1, 2, 3, ... and the number is the stream id, so that of two
coordinators of one run only one can append.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from coordinator.journal.codec import VERSION, decode_event, encode_event
from coordinator.machine.events import Event
from coordinator.machine.state import State
from paceline.errors import DataLoss, FailedPrecondition, Unavailable
from paceline.streams import run_key
from paceline.streams.connection import OUTAGE_ERRORS, address_of, redis_errors

NAME = "journal"
_FIELD = b"entry"
_PAGE = 500


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One event with what it changed."""

    event: Event
    step: int
    phase: str
    slots: tuple[dict[str, Any], ...] = ()  # changed slots: slot, holder, epoch, worker_state
    record: dict[str, Any] = field(
        default_factory=dict
    )  # StepRecord as JSON, with the event that closed the step

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; the form that paceline.report reads."""
        values: dict[str, Any] = {
            "v": VERSION,
            "at_s": self.event.at_s,
            "event": type(self.event).__name__,
            "data": encode_event(self.event),
            "step": self.step,
            "phase": self.phase,
            "slots": list(self.slots),
        }
        return values | ({"record": self.record} if self.record else {})

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> JournalEntry:
        """Raises DataLoss for another version or an event that does not decode."""
        if values.get("v") != VERSION:
            raise DataLoss(
                "a journal entry has another version", seen=values.get("v"), allowed=VERSION
            )
        event = decode_event(values["event"], values["at_s"], values["data"])
        record = values.get("record", {})
        return cls(event, values["step"], values["phase"], tuple(values["slots"]), record)


def entry_of(
    before: State, event: Event, after: State, record: dict[str, Any] | None = None
) -> JournalEntry:
    """The entry of one transition; a slot is listed when its holder, epoch or worker changed."""
    return JournalEntry(
        event, before.step, after.phase.value, changed_slots(before, after), record or {}
    )


def changed_slots(before: State, after: State) -> tuple[dict[str, Any], ...]:
    """The slots whose holder, epoch or worker state differs."""
    old, new = slot_views(before), slot_views(after)
    return tuple(view for i, view in enumerate(new) if i >= len(old) or old[i] != view)


def slot_views(state: State) -> list[dict[str, Any]]:
    """All slots as JSON values."""
    per_worker = state.settings.slots_per_worker
    return [
        {
            "slot": i,
            "holder": slot.holder.value,
            "epoch": slot.epoch,
            "worker_state": state.workers[i // per_worker].value,
        }
        for i, slot in enumerate(state.slots)
    ]


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
                    entry = JournalEntry.from_json(json.loads(fields[_FIELD]))
                except (KeyError, ValueError) as error:
                    raise DataLoss(
                        f"journal entry {self._count} does not decode: {error}"
                    ) from error
                yield entry

    async def append(self, entry: JournalEntry) -> None:
        """Durable when this returns.

        Raises FailedPrecondition when another coordinator has appended meanwhile.
        """
        body = json.dumps(entry.to_json(), separators=(",", ":")).encode()
        entry_id = f"{self._count + 1}-0"
        try:
            await self._client.xadd(self._key, {_FIELD: body}, id=entry_id)
        except OUTAGE_ERRORS as error:
            raise Unavailable(
                f"Redis at {address_of(self._client)} does not take the journal: {error}"
            ) from error
        except ResponseError as error:
            # A repetition after a lost answer finds its own entry.
            here = await self._range(entry_id, entry_id)
            if not here or here[0][1].get(_FIELD) != body:
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
