"""A stream and a ledger of tests, which also look at their entries without a group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from paceline.streams import Entry, Ledger, RedisStream
from paceline.streams.redis_stream import entries_of


@dataclass(frozen=True, slots=True)
class Depth:
    """Fill level of a stream."""

    entries: int
    bytes: int  # size of their fields and payloads
    pending: int  # delivered and not acknowledged, summed over groups
    dead: int = 0  # dead letters kept


class WatchedStream(RedisStream):
    """Entries, fill level and dead letters of a stream."""

    async def append(self, fields: Mapping[str, str], payload: bytes) -> str:
        """Append one entry."""
        (entry_id,) = await self.append_all([(fields, payload)])
        return entry_id

    async def history(self, after: str = "", count: int = 1000) -> list[Entry]:
        """Up to `count` entries after id `after` ("" = from the first)."""
        first = f"({after}" if after else "-"
        return entries_of(await self._client.xrange(self.key, first, "+", count=count))

    async def dead_letters(self) -> list[Entry]:
        """All dead letters, oldest first."""
        return entries_of(await self._client.xrange(self._dead))

    async def depth(self) -> Depth:
        """The fill level, counted by the server."""
        entries, dead = await self._client.xlen(self.key), await self._client.xlen(self._dead)
        total = await self._client.hget(self._sizes, "total")
        try:
            groups = await self._client.xinfo_groups(self.key)
        except ResponseError as error:
            if "no such key" not in str(error):
                raise
            groups = []  # nothing was appended yet
        return Depth(entries, int(total or 0), sum(one["pending"] for one in groups), dead)


async def ledger_record(ledger: Ledger, key: str) -> dict[str, Any] | None:
    """The record of one branch; None for a branch that is not in the ledger."""
    raw = await ledger._client.hget(ledger._ledger, key)
    return None if raw is None else json.loads(raw)
