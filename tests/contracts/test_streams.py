"""One contract for every stream: memory and Redis behave alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from memory_stream import MemoryStream
from watched_stream import WatchedStream

from paceline.errors import ResourceExhausted
from paceline.local.patience import patient
from paceline.streams import run_key


@pytest.fixture(params=["memory", "server"])
def redis_kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
async def stream(
    redis_kind: str, run_id: str, redis_client: redis.asyncio.Redis
) -> AsyncIterator[WatchedStream]:
    made = _make(redis_kind, run_id, redis_client, None)
    yield made
    await made.close()


@pytest.fixture
async def budgeted(
    redis_kind: str, run_id: str, redis_client: redis.asyncio.Redis
) -> AsyncIterator[WatchedStream]:
    made = _make(redis_kind, run_id, redis_client, 1000)
    yield made
    await made.close()


def _make(kind: str, run_id: str, client: redis.asyncio.Redis, budget: int | None) -> WatchedStream:
    name = run_key(run_id, "batches")
    return MemoryStream(name, budget) if kind == "memory" else WatchedStream(client, name, budget)


async def _fill(stream: WatchedStream, count: int, group: str = "g") -> list[str]:
    await stream.create_group(group)
    ids = [await stream.append({"n": str(n)}, b"payload-%d" % n) for n in range(count)]
    return [entry_id for entry_id in ids if entry_id is not None]


async def test_an_entry_comes_back_as_it_was_appended(stream: WatchedStream) -> None:
    await stream.create_group("g")
    payload = bytes(range(256)) * 40
    entry_id = await stream.append({"run": "ä", "empty": ""}, payload)
    (entry,) = await stream.read("g", "c", 10, 0)
    assert (entry.id, entry.fields, entry.payload) == (entry_id, {"run": "ä", "empty": ""}, payload)


async def test_several_appended_at_once_are_read_in_their_order(stream: WatchedStream) -> None:
    await stream.create_group("g")
    await stream.append_all([({"n": str(n)}, b"payload-%d" % n) for n in range(3)])
    await stream.append_all([])
    entries = await stream.read("g", "c", 10, 0)
    assert [(one.fields["n"], one.payload) for one in entries] == [
        (str(n), b"payload-%d" % n) for n in range(3)
    ]


async def test_of_several_one_beyond_the_budget_keeps_all_out(budgeted: WatchedStream) -> None:
    with pytest.raises(ResourceExhausted, match="one entry exceeds the budget"):
        await budgeted.append_all([({}, b"x"), ({}, bytes(2000))])
    assert (await budgeted.depth()).entries == 0


async def test_equal_entries_are_all_appended(stream: WatchedStream) -> None:
    assert len(set(await _fill(stream, 3))) == 3
    assert (await stream.depth()).entries == 3


async def test_entries_are_read_in_order_and_by_count(stream: WatchedStream) -> None:
    await _fill(stream, 5)
    first = await stream.read("g", "c", 2, 0)
    second = await stream.read("g", "c", 10, 0)
    assert [entry.fields["n"] for entry in [*first, *second]] == ["0", "1", "2", "3", "4"]
    assert len(first) == 2


async def test_every_group_sees_every_entry(stream: WatchedStream) -> None:
    await stream.create_group("other")
    await _fill(stream, 3)
    assert len(await stream.read("g", "c", 10, 0)) == 3
    assert len(await stream.read("other", "c", 10, 0)) == 3


async def test_two_consumers_of_a_group_share_the_entries(stream: WatchedStream) -> None:
    await _fill(stream, 6)
    one = await stream.read("g", "one", 3, 0)
    two = await stream.read("g", "two", 10, 0)
    assert sorted(entry.fields["n"] for entry in [*one, *two]) == ["0", "1", "2", "3", "4", "5"]
    assert len(one) == len(two) == 3


async def test_a_group_made_late_still_sees_the_first_entry(stream: WatchedStream) -> None:
    await _fill(stream, 2)
    await stream.create_group("late")
    assert [entry.fields["n"] for entry in await stream.read("late", "c", 10, 0)] == ["0", "1"]


async def test_making_a_group_again_keeps_its_place(stream: WatchedStream) -> None:
    await _fill(stream, 2)
    await stream.read("g", "c", 1, 0)
    await stream.create_group("g")
    assert [entry.fields["n"] for entry in await stream.read("g", "c", 10, 0)] == ["1"]


async def test_unacknowledged_entries_are_read_again_until_acknowledged(
    stream: WatchedStream,
) -> None:
    ids = await _fill(stream, 3)
    await stream.read("g", "c", 10, 0)
    await stream.ack("g", ids[:1])
    assert [entry.id for entry in await stream.unacked("g", "c")] == ids[1:]
    assert await stream.unacked("g", "other") == []
    await stream.ack("g", ids[1:])
    assert await stream.unacked("g", "c") == []
    depth = await stream.depth()
    assert (depth.entries, depth.pending) == (0, 0)


async def test_depth_counts_entries_bytes_and_pending(stream: WatchedStream) -> None:
    assert (await stream.depth()).entries == 0
    await stream.create_group("g")
    first = await stream.append({"ab": "cd"}, b"123456")
    await stream.append({"ab": "cd"}, b"123456")
    await stream.read("g", "c", 10, 0)
    depth = await stream.depth()
    assert (depth.entries, depth.bytes, depth.pending) == (2, 20, 2)
    assert first is not None
    await stream.ack("g", [first])
    depth = await stream.depth()
    assert (depth.entries, depth.bytes, depth.pending) == (1, 10, 1)


async def test_acknowledging_twice_changes_nothing(stream: WatchedStream) -> None:
    ids = await _fill(stream, 2)
    await stream.read("g", "c", 10, 0)
    await stream.ack("g", ids)
    await stream.ack("g", ids)
    depth = await stream.depth()
    assert (depth.entries, depth.bytes, depth.pending) == (0, 0, 0)


async def test_re_reading_acknowledges_entries_that_are_gone(stream: WatchedStream) -> None:
    await stream.create_group("other")
    ids = await _fill(stream, 3)
    await stream.read("g", "c", 10, 0)
    await stream.ack("other", ids[:2])
    assert [entry.id for entry in await stream.unacked("g", "c")] == ids[2:]
    assert (await stream.depth()).pending == 1


async def test_a_byte_budget_pushes_out_the_oldest(budgeted: WatchedStream) -> None:
    await budgeted.create_group("g")
    for n in range(5):
        await budgeted.append({"n": str(n)}, bytes(298))
    depth = await budgeted.depth()
    assert (depth.entries, depth.bytes) == (3, 900)
    assert [entry.fields["n"] for entry in await budgeted.read("g", "c", 10, 0)] == ["2", "3", "4"]


async def test_an_entry_larger_than_the_budget_is_refused_and_nothing_is_pushed_out(
    budgeted: WatchedStream,
) -> None:
    await budgeted.append({}, bytes(500))
    with pytest.raises(ResourceExhausted, match="1001"):
        await budgeted.append({}, bytes(1001))
    assert (await budgeted.depth()).entries == 1


async def test_a_blocking_read_wakes_on_append(stream: WatchedStream) -> None:
    await stream.create_group("g")
    reading = asyncio.create_task(stream.read("g", "c", 10, 20.0))
    done, _ = await asyncio.wait({reading}, timeout=0.1)
    assert not done
    began = time.monotonic()
    await stream.append({"n": "1"}, b"x")
    assert [entry.fields["n"] for entry in await reading] == ["1"]
    assert time.monotonic() - began < patient(10)


async def test_a_blocking_read_ends_at_its_deadline(stream: WatchedStream) -> None:
    await stream.create_group("g")
    began = time.monotonic()
    assert await stream.read("g", "c", 10, 0.2) == []
    assert 0.15 < time.monotonic() - began < patient(10)


async def test_a_cancelled_read_loses_nothing(stream: WatchedStream) -> None:
    await stream.create_group("g")
    for n in range(10):
        reading = asyncio.create_task(stream.read("g", "c", 10, 20.0))
        await asyncio.wait({reading}, timeout=0.01)
        appending = asyncio.create_task(stream.append({"n": str(n)}, b"x"))
        await asyncio.sleep(0)
        reading.cancel()
        await appending
        got = reading.result() if await _finished(reading) else await stream.read("g", "c", 10, 5.0)
        assert [entry.fields["n"] for entry in got] == [str(n)]


async def _finished(reading: asyncio.Task[list[object]]) -> bool:
    await asyncio.wait({reading})
    return not reading.cancelled()


async def test_a_dead_letter_leaves_the_stream_and_keeps_its_reason(stream: WatchedStream) -> None:
    ids = await _fill(stream, 2)
    bad, good = await stream.read("g", "c", 10, 0)
    await stream.dead_letter("g", bad, "does not decode")
    await stream.dead_letter("g", bad, "said twice")
    depth = await stream.depth()
    assert (depth.entries, depth.pending, depth.dead) == (1, 1, 1)
    (letter,) = await stream.dead_letters()
    assert (letter.payload, letter.fields["dead_reason"], letter.fields["dead_id"]) == (
        b"payload-0",
        "does not decode",
        ids[0],
    )
    assert letter.fields["n"] == "0"
    assert [entry.id for entry in await stream.unacked("g", "c")] == [good.id]


async def test_history_replays_all_entries_without_a_group(stream: WatchedStream) -> None:
    ids = await _fill(stream, 5)
    await stream.read("g", "c", 10, 0)
    first = await stream.history(count=2)
    rest = await stream.history(after=first[-1].id)
    assert [entry.id for entry in [*first, *rest]] == ids
    assert (await stream.depth()).pending == 5
