"""Builds the journal's entries, one per transition, and the facts for subscribers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from paceline.errors import DataLoss
from paceline.messages import versions_to_proto
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.slots import Holder, Slot, WorkerState
from paceline.services.coordinator.machine.state import Phase, State
from paceline.services.coordinator.machine.step import EVENTS
from paceline.tagged_json import fields_of, from_object, to_object
from paceline.v1 import coordinator_pb2 as pb

VERSION = 10


SlotRange = tuple[int, int, Holder, int]
"""Adjacent slots of equal status: first slot, number of slots, holder, epoch."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One event with its changes."""

    event: Event
    step: int  # before the event
    phase: str  # State.doing after the event
    slots: tuple[SlotRange, ...] = ()  # changed slots
    record: pb.StepRecord | None = None  # present if the event closed the step

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, in the form that paceline.report reads."""
        data = to_object(self.event)
        values: dict[str, Any] = {
            "v": VERSION,
            "at_s": data.pop("at_s"),
            "event": type(self.event).__name__,
            "data": data,
            **to_object(self, _CHANGES),
        }
        if self.record is not None:
            values["record"] = MessageToDict(self.record, preserving_proto_field_name=True)
        return values

    @classmethod
    def from_json(cls, values: Any) -> JournalEntry:
        """Restores an entry from `to_json`'s output. Raises DataLoss for another version
        or form.
        """
        if not isinstance(values, Mapping) or values.get("v") != VERSION:
            seen = values.get("v") if isinstance(values, Mapping) else values
            raise DataLoss("a journal entry has another version", seen=seen, allowed=VERSION)
        changes = {name: value for name, value in values.items() if name not in _REST}
        event, record = _event(values), _record(values.get("record"))
        return cls(event, **fields_of(cls, changes, _CHANGES), record=record)


_CHANGES = ("step", "phase", "slots")
_REST = frozenset({"v", "at_s", "event", "data", "record"})


def changed_slots(before: State, after: State) -> tuple[SlotRange, ...]:
    """Slots with a changed holder or epoch."""
    return tuple(slot_ranges(after, after.slots.changed_since(before.slots)))


def slot_ranges(state: State, slots: Iterable[int]) -> Iterator[SlotRange]:
    """Ascending slots as ranges of equal status."""
    first = count = 0
    status: tuple[Slot, WorkerState | None] | None = None
    for i in slots:
        now = state.slots[i], state.worker_on(i)
        if now == status and i == first + count:
            count += 1
            continue
        if status is not None:
            yield first, count, status[0].holder, status[0].epoch
        first, count, status = i, 1, now
    if status is not None:
        yield first, count, status[0].holder, status[0].epoch


def _event(values: Mapping[str, Any]) -> Event:
    classes = {cls.__name__: cls for cls in EVENTS}
    name, data = values.get("event"), values.get("data")
    cls = classes.get(name) if isinstance(name, str) else None
    if cls is None:
        message = "the journal names an event that is not known here"
        raise DataLoss(message, seen=name, allowed=", ".join(classes))
    if not isinstance(data, Mapping) or "at_s" in data:
        raise DataLoss(f"the data of {name} is no object of its fields", seen=str(data)[:200])
    return from_object(cls, {"at_s": values.get("at_s"), **data})


def _record(found: Any) -> pb.StepRecord | None:
    if found is None:
        return None
    try:
        return ParseDict(found, pb.StepRecord())
    # SystemError: protobuf's error for a field name that is not UTF-8.
    except (ParseError, ValueError, TypeError, AttributeError, OverflowError, SystemError) as error:
        seen = str(found)[:200]
        raise DataLoss(f"a step's record does not decode: {error}", seen=seen) from error


class Transition(NamedTuple):
    """One event and its effects."""

    before: State
    event: Event
    after: State
    issued: tuple[commands.Command, ...]
    changed: tuple[SlotRange, ...]  # see `changed_slots`
    record: pb.StepRecord | None = None  # closed or amended by the event
    fell: Mapping[str, float] | None = None  # figures of a fall in acceptance

    @property
    def entry(self) -> JournalEntry:
        """The transition in the journal; with its record if it closed the step."""
        closed = self.record if self.after.step > self.before.step else None
        return JournalEntry(self.event, self.before.step, self.after.doing, self.changed, closed)

    def fact(self, run_id: str, samples: int) -> pb.Fact | None:
        """All changes by the transition, unnumbered; None without any. `samples`: samples requested
        by a step, if any.
        """
        before, event, after = self.before, self.event, self.after
        fact, step = pb.Fact(slots=_ranges(after, self.changed)), before.step
        if isinstance(event, events.StepBegan) and after.rollouts.step > before.rollouts.step:
            step = event.step
            fact.step_began.samples = samples
            fact.step_began.SetInParent()
        if after.versions != before.versions:
            fact.version_committed.versions.CopyFrom(versions_to_proto(after.versions))
        if after.lost != before.lost:
            fact.services_away.services.extend(sorted(after.lost))
            fact.services_away.SetInParent()
        if (after.phase is Phase.PAUSED) != (before.phase is Phase.PAUSED):
            fact.paused = after.phase is Phase.PAUSED
        if self.record is not None:
            fact.step_finished.record.CopyFrom(self.record)
        for command in self.issued:
            if isinstance(command, commands.FinishRun):
                fact.run_finished.failure = command.failure
                fact.run_finished.SetInParent()
        if not fact.ByteSize():
            return None
        context = fact.context
        context.run_id, context.step, context.epoch = run_id, step, after.epoch
        fact.at_s = event.at_s
        return fact


def all_slots(state: State) -> list[pb.SlotRange]:
    """All slots in the wire's form."""
    return _ranges(state, slot_ranges(state, range(len(state.slots))))


def _ranges(state: State, ranges: Iterable[SlotRange]) -> list[pb.SlotRange]:
    return [
        pb.SlotRange(
            first=first,
            count=count,
            holder=f"HOLDER_{holder.upper()}",
            epoch=epoch,
            worker_state=f"WORKER_STATE_{(state.worker_on(first) or 'UNSPECIFIED').upper()}",
        )
        for first, count, holder, epoch in ranges
    ]
