"""Events as plain JSON and back, for the journal. Owns the version of that form, no storage."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from coordinator.machine.events import Event
from coordinator.machine.state import Evaluation, RunSettings, Service
from coordinator.machine.step import EVENTS
from paceline.errors import DataLoss
from paceline.trajectory import VersionSet

VERSION = 1
_EVENTS: dict[str, type[Any]] = {cls.__name__: cls for cls in EVENTS}
_NESTED: dict[str, Any] = {
    "settings": lambda value: RunSettings(**value),
    "versions": lambda value: VersionSet(**value),
    "service": Service,
    "kind": Evaluation,
    "details": lambda value: {
        key: tuple(v) if isinstance(v, list) else v for key, v in value.items()
    },
}


def encode_event(event: Event) -> dict[str, Any]:
    """The event's fields but its time, as JSON values."""
    return {name: value for name, value in asdict(event).items() if name != "at_s"}


def decode_event(name: str, at_s: float, data: dict[str, Any]) -> Event:
    """The event that `encode_event` was given. Raises DataLoss for an unknown name or field."""
    cls = _EVENTS.get(name)
    if cls is None:
        raise DataLoss(
            "the journal names an event that is not known here",
            seen=name,
            allowed=", ".join(_EVENTS),
        )
    known = {field.name for field in fields(cls)}
    if not set(data) <= known:
        raise DataLoss(
            f"the journal's {name} has fields not known here", seen=sorted(set(data) - known)
        )
    try:
        values = {
            key: _NESTED[key](value) if key in _NESTED else value for key, value in data.items()
        }
        event: Event = cls(at_s=at_s, **values)
    except (TypeError, ValueError) as error:
        raise DataLoss(
            f"the journal's {name} does not decode: {error}", seen=str(data)[:200]
        ) from error
    return event
