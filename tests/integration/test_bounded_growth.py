"""A long run leaves no more in the durable Redis than a short one."""

from __future__ import annotations

import redis.asyncio

from benchmarks.growth import simulate
from paceline.streams import Ledger, LedgerCount

SESSIONS = 8


async def test_a_run_of_three_times_the_steps_holds_no_more_in_redis(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    bytes_at: list[int] = []
    async for step in simulate(redis_client, run_id, 120, SESSIONS):
        if (step + 1) % 40 == 0:
            bytes_at.append(await _bytes_of(redis_client, run_id))
    assert bytes_at[2] <= 1.05 * bytes_at[0], bytes_at
    count = await Ledger(redis_client, run_id).count()
    assert count == LedgerCount(120 * SESSIONS, 120 * SESSIONS, {}, 0, 0)


async def _bytes_of(client: redis.asyncio.Redis, run_id: str) -> int:
    keys = [key async for key in client.scan_iter(match=f"paceline:{{{run_id}}}:*", count=1000)]
    return sum([await client.memory_usage(key, samples=0) or 0 for key in keys])
