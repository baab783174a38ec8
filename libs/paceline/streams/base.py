"""What a stream is: batches appended once, read by group, acknowledged after use.

It owns no storage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

DEAD_LETTERS_KEPT = 1000
"""Dead letters beyond this many push out the oldest."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One batch: header fields and one payload."""

    id: str
    fields: dict[str, str]
    payload: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Depth:
    """How full a stream is."""

    entries: int  # entries that lie in it
    bytes: int  # their fields and payloads
    pending: int  # delivered and not acknowledged, summed over groups
    trimmed: int = 0  # entries the byte budget has pushed out, since the stream began
    dead: int = 0  # dead letters kept


class Stream(Protocol):
    """Entries in the order of their append; every group sees each of them at least once.

    Errors of every call: Unavailable when the server stays away for longer than the outage allowed,
    ResourceExhausted (reason REDIS_FULL) when its memory or disk is full.
    """

    @property
    def name(self) -> str:
        """Key of the stream."""

    async def create_group(self, group: str) -> None:
        """Make a consumer group that reads from the first entry; an existing one stays as it is."""

    async def append(
        self, fields: Mapping[str, str], payload: bytes, *, key: str | None = None
    ) -> str | None:
        """Append one entry and return its id; None when `key` was appended before.

        A byte budget pushes out the oldest entries. Raises ResourceExhausted when one entry exceeds
        the budget alone.
        """

    async def append_all(self, entries: Sequence[tuple[Mapping[str, str], bytes]]) -> None:
        """Append several in one exchange, header and payload each. Raises ResourceExhausted when
        one exceeds the budget alone; after another error some of them may stand in the stream.
        """

    async def read(self, group: str, consumer: str, count: int, block_s: float) -> list[Entry]:
        """Up to `count` entries new to the group; waits up to `block_s` seconds for the first, then
        returns [].
        """

    async def ack(self, group: str, ids: Sequence[str], *, delete: bool = False) -> None:
        """Acknowledge entries after use; with `delete` they also leave the stream, for every
        group.
        """

    async def claim(self, group: str, consumer: str, min_idle_s: float, count: int) -> list[Entry]:
        """Take over up to `count` entries that a consumer has held unacknowledged for at least
        `min_idle_s`.
        """

    async def unacked(self, group: str, consumer: str) -> list[Entry]:
        """This consumer's delivered and unacknowledged entries from the first on; trimmed ones are
        acknowledged.
        """

    async def history(self, after: str = "", count: int = 1000) -> list[Entry]:
        """Up to `count` entries that follow id `after` ("" = from the first), without any group:
        for replay.
        """

    async def depth(self) -> Depth:
        """How full the stream is."""

    async def dead_letter(self, group: str, entry: Entry, reason: str) -> None:
        """Move an entry that cannot be used to the dead letters, and acknowledge it."""

    async def dead_letters(self, count: int = 100) -> list[Entry]:
        """The newest dead letters, oldest first; field `dead_reason` says why, `dead_id` which
        entry it was.
        """

    async def close(self) -> None:
        """Release connections; the entries stay."""


def entry_bytes(fields: Mapping[str, str], payload: bytes) -> int:
    """Size of an entry as the byte budget counts it."""
    return len(payload) + sum(
        len(name.encode()) + len(value.encode()) for name, value in fields.items()
    )
