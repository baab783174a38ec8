"""Entries of a stream and its fill level."""

from collections.abc import Mapping
from dataclasses import dataclass, field

DEAD_LETTERS_KEPT = 1000
"""Number of dead letters kept; a new one then removes the oldest."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One batch: header fields and one payload."""

    id: str
    fields: dict[str, str]
    payload: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Depth:
    """Fill level of a stream."""

    entries: int  # entries in the stream
    bytes: int  # size of their fields and payloads
    pending: int  # delivered and not acknowledged, summed over groups
    trimmed: int = 0  # entries removed by the byte budget, since the stream began
    dead: int = 0  # dead letters kept


def entry_bytes(fields: Mapping[str, str], payload: bytes) -> int:
    """Size of an entry as the byte budget counts it."""
    return len(payload) + sum(
        len(name.encode()) + len(value.encode()) for name, value in fields.items()
    )
