"""Reads a run's journal from the durable Redis, both new and archived entries.

Entries are numbered 1, 2, 3, ... and the number is the id in the stream `journal`. Entries behind
the newest snapshot are in the stream `journal:archive`, many in one packed entry with the last
number as its id. Packed entries take a tenth of the space.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from redis.asyncio import Redis

from paceline.errors import DataLoss
from paceline.streams.connection import redis_errors, run_key

JOURNAL, ARCHIVE = "journal", "journal:archive"
ENTRY, ENTRIES = b"entry", b"entries"
"""Field of a single entry, and of packed entries in the archive."""
_PAGE = 500

Page = Sequence[tuple[bytes, dict[bytes, bytes]]]


async def journal_lines(client: Redis, run_id: str, after: int = 0) -> AsyncIterator[bytes]:
    """The lines of all entries after number `after`, in order.

    Raises DataLoss when an entry is missing or the archive is damaged, and Unavailable.
    """
    while True:
        first, page = _numbered(await journal_page(client, run_id, after))
        if first != after + 1:  # archived, perhaps since the first read
            archived = await _range(client, run_key(run_id, ARCHIVE), f"({after}-0", "+", 1)
            if not archived and not page:
                return
            first, page = _unpacked(archived) if archived else (first, page)
        if not first <= after + 1 < first + len(page):
            raise DataLoss("the journal has a gap", seen=first, allowed=after + 1)
        for line in page[after + 1 - first :]:
            yield line
        after = first + len(page) - 1


async def journal_page(client: Redis, run_id: str, after: int, last: int | None = None) -> Page:
    """The next unarchived entries after `after`, up to `last`."""
    until = "+" if last is None else f"{last}-0"
    return await _range(client, run_key(run_id, JOURNAL), f"({after}-0", until, _PAGE)


def packed(lines: Sequence[bytes]) -> bytes:
    """Lines in the archive's form."""
    return zlib.compress(b"\n".join(lines))


def entry_number(entry_id: bytes) -> int:
    """The number in an id of either stream."""
    return int(entry_id.split(b"-")[0])


def _numbered(page: Page) -> tuple[int, list[bytes]]:
    """The number of the first entry, 0 without entries, and the lines up to a gap."""
    first = entry_number(page[0][0]) if page else 0
    lines: list[bytes] = []
    for index, (entry_id, fields) in enumerate(page):
        if entry_number(entry_id) != first + index:
            break
        lines.append(fields.get(ENTRY, b""))
    return first, lines


def _unpacked(archived: Page) -> tuple[int, list[bytes]]:
    ((entry_id, fields),) = archived
    try:
        lines = zlib.decompress(fields[ENTRIES]).split(b"\n")
    except (KeyError, zlib.error) as error:
        raise DataLoss(f"archived journal entries do not unpack: {error}", seen=entry_id) from error
    return entry_number(entry_id) - len(lines) + 1, lines


async def _range(client: Redis, key: str, first: str, last: str, count: int) -> Page:
    with redis_errors(client, "reading the journal"):
        page: Any = await client.xrange(key, min=first, max=last, count=count)
    return list(page)
