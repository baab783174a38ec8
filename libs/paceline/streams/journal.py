"""Reads a run's journal from the durable Redis, and defines the form of an entry.

Entries are numbered 1, 2, 3, ... and the number is the id in the stream `journal`. Entries behind
the newest snapshot are in the stream `journal:archive`, many in one packed entry with the last
number as its id. Packed entries take a tenth of the space.
"""

import json
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from redis.asyncio import Redis

from paceline.errors import DataLoss
from paceline.streams.connection import redis_errors, run_key

FIELDS = ("v", "at_s", "event", "data", "step", "phase", "slots", "record")
"""The last field is absent in most entries. `slots` lists ranges of changed slots: (first slot,
number of slots, holder, epoch).
"""


class SlotUse(StrEnum):
    """The use of a slot-second, exactly one per slot-second: keys of a record's slot_s."""

    GENERATING = "generating"
    POLICY = "policy"
    DRAFTER = "drafter"
    TRANSFERRING = "transferring"  # weights in transfer, to the engine or onto the drafter's slots
    IDLE = "idle"


class IdleCause(StrEnum):
    """The reason for an idle slot: keys of a record's idle_s."""

    UNTRAINED = "untrained"  # no drafter is trained, or none in this step
    TRAINER_AWAY = "trainer_away"
    TRAINER_DONE = "trainer_done"  # the drafter trainer has used all rows and left
    COMMIT = "commit"  # a released worker may be needed as the canary
    ENOUGH = "enough"  # the drafter has max_drafter_slots
    GIVING_BACK = "giving_back"  # the lease of the entry is about to end
    SERIAL = "serial"  # the serial drafter schedule trains between policy step and commit
    HAND_OVER = "hand_over"  # all rollouts are done; the slots pass to the policy
    LEASING = "leasing"  # about to be leased


def pack_entry(entry: Mapping[str, Any]) -> bytes:
    """The line of an entry."""
    values = [entry[name] for name in FIELDS if name in entry]
    return json.dumps(values, separators=(",", ":")).encode()


def unpack_entry(line: bytes | str) -> dict[str, Any]:
    """The entry of a line, by name. Raises ValueError or RecursionError for a malformed line."""
    values = json.loads(line)
    if not isinstance(values, list) or len(values) > len(FIELDS):
        raise ValueError(f"no list of {', '.join(FIELDS)}")
    return dict(zip(FIELDS, values, strict=False))


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
