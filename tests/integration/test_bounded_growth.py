"""A long run leaves no more data in the durable Redis than a short run."""

from __future__ import annotations

import pytest
import redis.asyncio

from benchmarks.growth import simulate
from benchmarks.growth_coordinator import SNAPSHOT_ENTRIES, WORKERS, JournaledRun, replayed
from paceline.services.coordinator.journal.journal import Journal
from paceline.streams import Ledger, LedgerCount, run_key

pytestmark = pytest.mark.slow

SESSIONS = 8
ENTRIES_OF_A_STEP = WORKERS + 5


async def test_a_run_of_three_times_the_steps_holds_no_more_sessions_and_replays_no_more_entries(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    course = JournaledRun(redis_client, run_id, 240)
    bytes_at: list[int] = []
    async for step in simulate(redis_client, run_id, 240, SESSIONS, course):
        if (step + 1) % 80 == 0:
            bytes_at.append(await _bytes_but_journal(redis_client, run_id))
    assert bytes_at[2] <= 1.05 * bytes_at[0], bytes_at
    count = await Ledger(redis_client, run_id).count()
    assert count == LedgerCount(240 * SESSIONS, 240 * SESSIONS, {}, 0, 0)

    await replayed(redis_client, run_id, course)
    journal = Journal(redis_client, run_id)
    assert await journal.newest() is not None
    assert sum([1 async for _ in journal.entries()]) < SNAPSHOT_ENTRIES + ENTRIES_OF_A_STEP
    in_stream = await redis_client.xlen(run_key(run_id, "journal"))
    assert in_stream < SNAPSHOT_ENTRIES + ENTRIES_OF_A_STEP
    assert await redis_client.xlen(run_key(run_id, "journal:archive")) == 3

    await redis_client.set(run_key(run_id, "journal:snapshot"), b"damaged")
    await replayed(redis_client, run_id, course)


async def _bytes_but_journal(client: redis.asyncio.Redis, run_id: str) -> int:
    """The journal is kept whole for the report: a few KB a step."""
    keys = [key async for key in client.scan_iter(match=f"paceline:{{{run_id}}}:*", count=1000)]
    held = {key: await client.memory_usage(key, samples=0) or 0 for key in keys}
    return sum(held[key] for key in held if b":journal" not in key)
