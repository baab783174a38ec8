"""A stream in Redis: consumer groups, appends that happen once, and reads that survive an
outage.
"""

import asyncio
import sys
import uuid
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio
from redis.exceptions import ResponseError

from paceline.errors import ResourceExhausted
from paceline.streams import connection, scripts

DEAD_LETTERS_KEPT = 1000
"""Number of dead letters kept; a new one then removes the oldest."""

_PAYLOAD = b"payload"
_NONCE_MS = 120_000
"""Milliseconds during which an append can be repeated safely; longer than any outage."""

_PAGE = 16
"""Pending entries per read; an entry may be megabytes."""

_ANSWER_S = 5.0
"""Seconds beyond its blocking time after which a read without an answer counts as an outage."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One batch: header fields and one payload."""

    id: str
    fields: dict[str, str]
    payload: bytes = field(repr=False)


def entry_bytes(fields: Mapping[str, str], payload: bytes) -> int:
    """Size of an entry as the byte budget counts it."""
    return len(payload) + sum(
        len(name.encode()) + len(value.encode()) for name, value in fields.items()
    )


class RedisStream:
    """Entries in the order of their append; every group reads each of them at least once.

    Every call may raise Unavailable when the server stays away for longer than the permitted
    outage, and ResourceExhausted (reason REDIS_FULL) when its memory or disk is full. `client` is
    created by connect(). The caller owns it and closes it.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        key: str,
        byte_budget: int | None = None,
        *,
        outage_s: float | None = None,
    ) -> None:
        # The client's annotations allow text or bytes; replies here are always bytes.
        self._client: Any = client
        self._reader: Any = connection.blocking_twin(client)
        self.key = key
        self._budget = byte_budget
        self._outage_s = connection.OUTAGE_S if outage_s is None else outage_s
        self._sizes = f"{key}:sizes"
        self._dead = f"{key}:dead"
        self._append = client.register_script(scripts.script("add", "append"))
        self._ack = client.register_script(scripts.script("remove", "ack"))
        self._bury = client.register_script(scripts.script("add", "remove", "dead_letter"))
        self._held: dict[tuple[str, str], set[str]] = {}
        self._doubtful: set[tuple[str, str]] = set()

    async def create_group(self, group: str) -> None:
        """Creates a group that reads from the first entry, if necessary before the first append."""
        with connection.redis_errors(self._client, f"create group {group} on {self.key}"):
            try:
                await self._client.xgroup_create(self.key, group, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    async def append_all(self, entries: Sequence[tuple[Mapping[str, str], bytes]]) -> list[str]:
        """Appends several entries in one transaction and returns their ids. Each is appended once,
        also after a lost answer to the first try. A byte budget removes the oldest entries.

        Raises ResourceExhausted when one entry exceeds the budget alone. After another error, some
        entries may be in the stream.
        """
        sizes = [entry_bytes(*entry) for entry in entries]
        if self._budget is not None and max(sizes, default=0) > self._budget:
            message = f"one entry exceeds the budget of {self.key}"
            raise ResourceExhausted(message, seen=max(sizes), allowed=self._budget)
        with connection.redis_errors(self._client, f"append to {self.key}"):
            pipe = self._client.pipeline(transaction=True)
            for size, entry in zip(sizes, entries, strict=True):
                keys = [self.key, f"{self.key}:once:{uuid.uuid4().hex}", self._sizes]
                args = [_NONCE_MS, self._budget or 0, size, *flat(*entry)]
                await self._append(keys=keys, args=args, client=pipe)
            return [bytes(entry_id).decode() for entry_id in await pipe.execute()]

    async def read(self, group: str, consumer: str, count: int, block_s: float) -> list[Entry]:
        """Up to `count` entries new to the group. Waits up to `block_s` seconds for the first one,
        then returns []; an outage adds at most the permitted outage.
        """
        clock = asyncio.get_running_loop().time
        deadline, pause_s = clock() + block_s, 0.01
        away_since: float | None = None
        with connection.redis_errors(self._client, f"read {self.key} as {group}/{consumer}"):
            while True:
                try:
                    return await self._read_once(group, consumer, count, deadline)
                except (*connection.OUTAGE_ERRORS, asyncio.CancelledError) as error:
                    # The server delivered these entries into the lost connection; this consumer
                    # never received them.
                    self._doubtful.add((group, consumer))
                    if isinstance(error, asyncio.CancelledError):
                        raise
                    away_since = clock() if away_since is None else away_since
                    if clock() - away_since > self._outage_s:
                        raise
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, connection.BACKOFF_CAP_S)
                except ResponseError as error:
                    # A server without persistence is empty after its restart.
                    if not str(error).startswith("NOGROUP"):
                        raise
                    await self.create_group(group)

    async def ack(self, group: str, ids: Sequence[str]) -> None:
        """Acknowledges entries after use, in one script. They leave the stream, for every group."""
        if not ids:
            return
        with connection.redis_errors(self._client, f"acknowledge on {self.key}"):
            await self._ack(keys=[self.key, self._sizes], args=[group, *ids])
        for held in self._held.values():
            held.difference_update(ids)

    async def unacked(self, group: str, consumer: str) -> list[Entry]:
        """This consumer's delivered and unacknowledged entries, from the first on. Trimmed entries
        are acknowledged.
        """
        with connection.redis_errors(self._client, f"re-read {self.key} as {group}/{consumer}"):
            entries = await self._pending(group, consumer, frozenset(), sys.maxsize)
        self._hold(group, consumer, entries)
        return entries

    async def dead_letter(self, group: str, entry: Entry, reason: str) -> None:
        """Moves an unusable entry to the dead letters, and acknowledges it, in one script."""
        fields = {**entry.fields, "dead_reason": reason, "dead_id": entry.id, "dead_group": group}
        args = [group, entry.id, DEAD_LETTERS_KEPT, *flat(fields, entry.payload)]
        with connection.redis_errors(self._client, f"dead-letter on {self.key}"):
            await self._bury(keys=[self.key, self._sizes, self._dead], args=args)
        for held in self._held.values():
            held.discard(entry.id)

    async def close(self) -> None:
        """Closes the reading connections. The client stays open for its owner."""
        await self._reader.aclose()

    async def _read_once(
        self, group: str, consumer: str, count: int, deadline: float
    ) -> list[Entry]:
        if (group, consumer) in self._doubtful:
            known = self._held.get((group, consumer), set())
            missed = await self._pending(group, consumer, known, count)
            if missed:
                self._hold(group, consumer, missed)
                return missed
            self._doubtful.discard((group, consumer))

        left_s = deadline - asyncio.get_running_loop().time()
        block = ["BLOCK", max(1, int(left_s * 1000))] if left_s > 0 else []
        async with asyncio.timeout(max(left_s, 0) + _ANSWER_S):
            read = ["XREADGROUP", "GROUP", group, consumer, "COUNT", count, *block]
            reply = await self._reader.execute_command(*read, "STREAMS", self.key, ">")

        entries = entries_of(reply[0][1]) if reply else []
        self._hold(group, consumer, entries)
        return entries

    async def _pending(self, group: str, consumer: str, known: Set[str], count: int) -> list[Entry]:
        """Up to `count` pending entries outside `known`, page by page. Deleted entries are
        acknowledged.
        """
        found: list[Entry] = []
        after = "0"
        while True:
            reply = await self._client.execute_command(
                "XREADGROUP", "GROUP", group, consumer, "COUNT", _PAGE, "STREAMS", self.key, after
            )
            rows = reply[0][1] if reply else []
            found += [entry for entry in entries_of(rows) if entry.id not in known]
            if not rows or len(found) >= count:
                return found[:count]
            gone = [row[0] for row in rows if not row[1]]
            if gone:
                await self._client.xack(self.key, group, *gone)
            after = bytes(rows[-1][0]).decode()

    def _hold(self, group: str, consumer: str, entries: Sequence[Entry]) -> None:
        self._held.setdefault((group, consumer), set()).update(entry.id for entry in entries)


def flat(fields: Mapping[str, str], payload: bytes) -> list[str | bytes]:
    """Fields and payload in Redis' form: name, value, ..."""
    return [part for pair in fields.items() for part in pair] + [_PAYLOAD, payload]


def entries_of(rows: Sequence[Any]) -> list[Entry]:
    """Entries from rows of (id, fields), without rows of deleted entries.

    Fields are a flat list or a mapping, depending on the client's parser for the command.
    """
    return [_entry(row) for row in rows if row is not None and row[0] is not None and row[1]]


def _entry(row: Any) -> Entry:
    raw = row[1]
    fields = dict(raw) if isinstance(raw, Mapping) else dict(zip(raw[::2], raw[1::2], strict=True))
    payload = fields.pop(_PAYLOAD, b"")
    texts = {k.decode(): v.decode(errors="replace") for k, v in fields.items()}
    return Entry(row[0].decode(), texts, payload)
