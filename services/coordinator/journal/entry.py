"""Builds the journal's entries, one per transition, and the facts for subscribers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from paceline.errors import DataLoss
from paceline.messages import versions_to_proto
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.slots import Holder, Slot, WorkerState
from paceline.services.coordinator.machine.state import Phase, State
from paceline.services.coordinator.machine.step import EVENTS
from paceline.tagged_json import from_object, to_object
from paceline.v1 import coordinator_pb2 as pb
from paceline.v1.coordinator_pb2 import StepRecord

VERSION = 8


SlotRange = tuple[int, int, Holder, int]
"""Adjacent slots of equal status: first slot, number of slots, holder, epoch."""


@dataclass(frozen=True, slots=True)
class EntryBody:
    """Content of an entry beside its event."""

    step: int  # before the event
    phase: str  # State.doing after the event
    slots: tuple[SlotRange, ...] = ()  # changed slots


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One event with its changes."""

    event: Event
    body: EntryBody
    record: StepRecord | None = None  # present if the event closed the step

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, in the form that paceline.report reads."""
        data = to_object(self.event)
        values: dict[str, Any] = {
            "v": VERSION,
            "at_s": data.pop("at_s"),
            "event": type(self.event).__name__,
            "data": data,
            "step": self.body.step,
            "phase": self.body.phase,
            "slots": [
                [first, count, holder.value, epoch]
                for first, count, holder, epoch in self.body.slots
            ],
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
        body = {name: value for name, value in values.items() if name not in _NOT_BODY}
        return cls(_event(values), from_object(EntryBody, body), _record(values.get("record")))


_NOT_BODY = frozenset({"v", "at_s", "event", "data", "record"})


def entry_of(
    before: State,
    event: Event,
    after: State,
    changed: tuple[SlotRange, ...],
    record: StepRecord | None = None,
) -> JournalEntry:
    """The entry of one transition; it contains `record` if the transition closed the step.

    `changed`: the transition's `changed_slots`.
    """
    body = EntryBody(before.step, after.doing, changed)
    return JournalEntry(event, body, record if after.step > before.step else None)


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
        raise DataLoss(
            "the journal names an event that is not known here",
            seen=name,
            allowed=", ".join(classes),
        )
    if not isinstance(data, Mapping) or "at_s" in data:
        raise DataLoss(f"the data of {name} is no object of its fields", seen=str(data)[:200])
    return from_object(cls, {"at_s": values.get("at_s"), **data})


def _record(found: Any) -> StepRecord | None:
    if found is None:
        return None
    try:
        return ParseDict(found, StepRecord())
    except (
        ParseError,
        ValueError,
        TypeError,
        AttributeError,
        OverflowError,
        SystemError,  # protobuf's error for a field name that is not UTF-8
    ) as error:
        seen = str(found)[:200]
        raise DataLoss(f"a step's record does not decode: {error}", seen=seen) from error


def fact_of(
    run_id: str,
    before: State,
    event: Event,
    after: State,
    issued: Sequence[commands.Command],
    changed: Sequence[SlotRange],
    record: pb.StepRecord | None,
    samples: int,
) -> pb.Fact | None:
    """All changes by a transition, unnumbered; None without any.

    `changed`: the transition's `changed_slots`. `samples`: samples requested by a step, if any.
    """
    fact = pb.Fact(slots=_ranges(after, changed))
    step = before.step
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
    if record is not None:
        fact.step_finished.record.CopyFrom(record)
    for command in issued:
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
