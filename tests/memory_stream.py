"""A stream in memory with RedisStream's contract, for tests that need no Redis."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from watched_stream import Depth

from paceline.errors import FailedPrecondition, ResourceExhausted
from paceline.streams.redis_stream import DEAD_LETTERS_KEPT, Entry, entry_bytes


@dataclass(slots=True)
class _Delivery:
    """The consumer that holds an entry."""

    consumer: str


@dataclass(slots=True)
class _Group:
    """Cursor and pending entries of one group."""

    last: int = 0
    pending: OrderedDict[int, _Delivery] = field(default_factory=OrderedDict)


class MemoryStream:
    """Stream over a dict; see RedisStream for the contract."""

    def __init__(self, name: str, byte_budget: int | None = None) -> None:
        self.key = name
        self._budget = byte_budget
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._groups: dict[str, _Group] = {}
        self._dead: deque[Entry] = deque(maxlen=DEAD_LETTERS_KEPT)
        self._bytes = 0
        self._next = 1
        self._appended = asyncio.Condition()

    async def create_group(self, group: str) -> None:
        """Make a group that reads from the first entry."""
        self._groups.setdefault(group, _Group())

    async def append(self, fields: Mapping[str, str], payload: bytes) -> str:
        """Append one entry."""
        size = self._size(fields, payload)
        number, self._next = self._next, self._next + 1
        self._entries[number] = Entry(f"{number}-0", dict(fields), bytes(payload))
        self._bytes += size
        while self._budget is not None and self._bytes > self._budget:
            self._remove(next(iter(self._entries)))
        async with self._appended:
            self._appended.notify_all()
        return f"{number}-0"

    def _size(self, fields: Mapping[str, str], payload: bytes) -> int:
        size = entry_bytes(fields, payload)
        if self._budget is not None and size > self._budget:
            raise ResourceExhausted(
                f"one entry exceeds the budget of {self.key}", seen=size, allowed=self._budget
            )
        return size

    async def append_all(self, entries: Sequence[tuple[Mapping[str, str], bytes]]) -> None:
        """Append several entries in order."""
        for one in entries:
            self._size(*one)
        for fields, payload in entries:
            await self.append(fields, payload)

    async def read(self, group: str, consumer: str, count: int, block_s: float) -> list[Entry]:
        """New entries; wakes on append."""
        state = self._group(group)
        async with self._appended:
            try:
                async with asyncio.timeout(max(block_s, 0)):
                    await self._appended.wait_for(
                        lambda: any(True for _ in self._after(state.last))
                    )
            except TimeoutError:
                return []
            fresh = list(islice(self._after(state.last), count))
        for number in fresh:
            state.pending[number] = _Delivery(consumer)
        state.last = fresh[-1] if fresh and len(fresh) == count else self._next - 1
        return [self._entries[number] for number in fresh]

    async def ack(self, group: str, ids: Sequence[str]) -> None:
        """Acknowledge and delete."""
        state = self._group(group)
        for number in map(_number, ids):
            state.pending.pop(number, None)
            self._remove(number)

    async def unacked(self, group: str, consumer: str) -> list[Entry]:
        """Entries this consumer holds."""
        state = self._group(group)
        held = sorted(
            number for number, delivery in state.pending.items() if delivery.consumer == consumer
        )
        for number in held:
            if number not in self._entries:
                del state.pending[number]
        return [self._entries[number] for number in held if number in self._entries]

    async def history(self, after: str = "", count: int = 1000) -> list[Entry]:
        """Entries that follow an id."""
        return [
            self._entries[number]
            for number in islice(self._after(_number(after) if after else 0), count)
        ]

    async def depth(self) -> Depth:
        """Entries, bytes and pending entries of the stream."""
        pending = sum(len(group.pending) for group in self._groups.values())
        return Depth(len(self._entries), self._bytes, pending, len(self._dead))

    async def dead_letter(self, group: str, entry: Entry, reason: str) -> None:
        """Set an entry aside."""
        if _number(entry.id) not in self._group(group).pending:
            return
        fields = {**entry.fields, "dead_reason": reason, "dead_id": entry.id, "dead_group": group}
        self._dead.append(replace(entry, fields=fields))
        await self.ack(group, [entry.id])

    async def dead_letters(self) -> list[Entry]:
        """All dead letters."""
        return list(self._dead)

    async def close(self) -> None:
        """Nothing to release."""

    def _group(self, group: str) -> _Group:
        if group not in self._groups:
            raise FailedPrecondition(
                f"stream {self.key} has no such group", seen=group, allowed=sorted(self._groups)
            )
        return self._groups[group]

    def _after(self, last: int) -> Iterator[int]:
        return (number for number in self._entries if number > last)

    def _remove(self, number: int) -> None:
        entry = self._entries.pop(number, None)
        if entry is not None:
            self._bytes -= entry_bytes(entry.fields, entry.payload)


def _number(entry_id: str) -> int:
    return int(entry_id.split("-")[0])
