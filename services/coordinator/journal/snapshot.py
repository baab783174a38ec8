"""The result of a run's entries at the end of a step, from which a replay can start. It contains
everything that decides about later events.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, make_dataclass
from typing import Any, get_type_hints

from paceline.errors import DataLoss
from paceline.services.coordinator.journal.entry import VERSION
from paceline.services.coordinator.journal.groups import KnownGroup
from paceline.services.coordinator.journal.records import Carried
from paceline.services.coordinator.machine.slots import (
    Holder,
    Slot,
    WorkerState,
    slot_row,
    worker_row,
)
from paceline.services.coordinator.machine.state import State
from paceline.tagged_json import from_object, to_object

_ROWS = ("slots", "workers")
_REST: Any = make_dataclass(
    "Rest", [(name, hint) for name, hint in get_type_hints(State).items() if name not in _ROWS]
)
"""The state without its rows."""


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


@dataclass(frozen=True, slots=True)
class _Beside:
    """The part of a snapshot outside the state."""

    v: int
    entries: int
    at_s: float
    traceparents: dict[str, str]
    records: Carried
    groups: dict[str, tuple[KnownGroup, ...]]
    watched: tuple[int, float] | None
    slots: tuple[tuple[Holder, int], ...]
    workers: tuple[WorkerState, ...]


def pack_snapshot(snapshot: Snapshot) -> bytes:
    """One line of JSON."""
    state = snapshot.state
    beside = _Beside(
        VERSION,
        snapshot.entries,
        snapshot.at_s,
        snapshot.traceparents,
        snapshot.records,
        snapshot.groups,
        snapshot.watched,
        tuple((slot.holder, slot.epoch) for slot in state.slots),
        tuple(state.workers),
    )
    rest = _REST(**{one.name: getattr(state, one.name) for one in fields(_REST)})
    values = {"beside": to_object(beside), "state": to_object(rest)}
    return json.dumps(values, separators=(",", ":")).encode()


def unpack_snapshot(line: bytes) -> Snapshot:
    """Restores a snapshot from `pack_snapshot`'s output. Raises DataLoss for any other input."""
    try:
        values = json.loads(line)
        beside = from_object(_Beside, values["beside"])
        rest = from_object(_REST, values["state"], "State")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataLoss(f"a snapshot does not decode: {error}", seen=line[:80]) from error

    if beside.v != VERSION:
        raise DataLoss("a snapshot has another version", seen=beside.v, allowed=VERSION)
    state = State(
        slots=slot_row(Slot(holder, epoch) for holder, epoch in beside.slots),
        workers=worker_row(beside.workers),
        **vars(rest),
    )
    return Snapshot(
        *(beside.entries, beside.at_s, beside.traceparents, state),
        *(beside.records, beside.groups, beside.watched),
    )
