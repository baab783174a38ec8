"""The contract of a stream: batches are appended once, read by group, and acknowledged after use.

Storage is in the implementations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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


class Stream(Protocol):
    """Entries in the order of their append; every group reads each of them at least once.

    Every call may raise Unavailable when the server stays away for longer than the permitted
    outage, and ResourceExhausted (reason REDIS_FULL) when its memory or disk is full.
    """

    @property
    def name(self) -> str:
        """Key of the stream."""

    async def create_group(self, group: str) -> None:
        """Creates a consumer group that reads from the first entry; an existing group stays
        unchanged.
        """

    async def append(
        self, fields: Mapping[str, str], payload: bytes, *, key: str | None = None
    ) -> str | None:
        """Appends one entry and returns its id; None if `key` was appended before.

        A byte budget removes the oldest entries. Raises ResourceExhausted when one entry exceeds
        the budget alone.
        """

    async def append_all(self, entries: Sequence[tuple[Mapping[str, str], bytes]]) -> None:
        """Appends several entries in one exchange, each a header and a payload. Raises
        ResourceExhausted when one entry exceeds the budget alone. After another error, some entries
        may be in the stream.
        """

    async def read(self, group: str, consumer: str, count: int, block_s: float) -> list[Entry]:
        """Up to `count` entries new to the group. Waits up to `block_s` seconds for the first one,
        then returns [].
        """

    async def ack(self, group: str, ids: Sequence[str], *, delete: bool = False) -> None:
        """Acknowledges entries after use. With `delete` they also leave the stream, for every
        group.
        """

    async def claim(self, group: str, consumer: str, min_idle_s: float, count: int) -> list[Entry]:
        """Takes over up to `count` entries that a consumer has held unacknowledged for at least
        `min_idle_s`.
        """

    async def unacked(self, group: str, consumer: str) -> list[Entry]:
        """This consumer's delivered and unacknowledged entries, from the first on. Trimmed entries
        are acknowledged.
        """

    async def history(self, after: str = "", count: int = 1000) -> list[Entry]:
        """Up to `count` entries after id `after` ("" = from the first), without a group, for
        replay.
        """

    async def depth(self) -> Depth:
        """Fill level of the stream."""

    async def dead_letter(self, group: str, entry: Entry, reason: str) -> None:
        """Moves an unusable entry to the dead letters, and acknowledges it."""

    async def dead_letters(self, count: int = 100) -> list[Entry]:
        """The newest dead letters, oldest first. Field `dead_reason` has the reason, `dead_id` the
        id of the entry.
        """

    async def close(self) -> None:
        """Releases connections; the entries stay."""


def entry_bytes(fields: Mapping[str, str], payload: bytes) -> int:
    """Size of an entry as the byte budget counts it."""
    return len(payload) + sum(
        len(name.encode()) + len(value.encode()) for name, value in fields.items()
    )
