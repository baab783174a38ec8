"""Redis dies in the middle and comes back from its log: nothing is lost and nothing doubled."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from paceline.local.patience import patient
from paceline.streams import RedisStream, connect, run_key

if TYPE_CHECKING:
    from redis_servers import RedisServer

pytestmark = pytest.mark.chaos

TOTAL = 300
KILLS_AT = (60, 150)
AWAY_S = 1.0


async def _append_all(stream: RedisStream, server: RedisServer) -> None:
    for n in range(TOTAL):
        if n in KILLS_AT:
            server.kill()
            asyncio.get_running_loop().call_later(AWAY_S, server.start_without_waiting)
        key = f"k{n}" if n % 2 else None
        assert await stream.append({"n": str(n)}, b"x" * 100, key=key) is not None


async def _read_all(stream: RedisStream) -> list[int]:
    numbers: list[int] = []
    while len(numbers) < TOTAL:
        entries = await stream.read("g", "c", 7, 5.0)
        numbers += [int(entry.fields["n"]) for entry in entries]
        await stream.ack("g", [entry.id for entry in entries], delete=True)
    return numbers


async def test_appends_and_reads_go_on_after_an_outage(
    durable_server: RedisServer, run_id: str
) -> None:
    client = connect(durable_server.url)
    stream = RedisStream(client, run_key(run_id, "s"))
    await stream.create_group("g")
    async with asyncio.timeout(patient(30)):
        _, numbers = await asyncio.gather(_append_all(stream, durable_server), _read_all(stream))
    assert numbers == list(range(TOTAL))
    depth = await stream.depth()
    assert (depth.entries, depth.bytes, depth.pending) == (0, 0, 0)
    await stream.close()
    await client.aclose()
