"""Appends to the journal on a real Redis: full, and taken by another coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis.asyncio
from redis_servers import foreign_redis

from paceline.errors import FailedPrecondition, InvalidInput, ResourceExhausted
from paceline.services.coordinator.journal.entry import JournalEntry
from paceline.services.coordinator.journal.journal import Journal
from paceline.services.coordinator.machine import events
from paceline.streams import connect, run_key


def _entry(at_s: float) -> JournalEntry:
    return JournalEntry(events.StopRequested(at_s), 0, "ready")


async def _bodies(journal: Journal) -> list[float]:
    return [entry.event.at_s async for entry in journal.entries()]


async def test_a_full_redis_is_no_other_coordinator_and_the_entry_goes_in_later(
    tmp_path: Path, run_id: str
) -> None:
    with foreign_redis(tmp_path / "r") as url:
        client = connect(url)
        journal = Journal(client, run_id)
        await journal.append(_entry(1.0))
        await client.config_set("maxmemory", "1")
        with pytest.raises(ResourceExhausted, match="has no memory left: append to"):
            await journal.append(_entry(2.0))
        await client.config_set("maxmemory", "0")
        await journal.append(_entry(2.0))
        assert await _bodies(Journal(client, run_id)) == [1.0, 2.0]
        await client.aclose()


async def test_only_an_entry_with_another_body_says_that_the_journal_is_taken(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    first, other = Journal(redis_client, run_id), Journal(redis_client, run_id)
    await first.append(_entry(1.0))
    await other.append(_entry(1.0))  # as a call that is repeated after its answer was lost
    await first.append(_entry(2.0))
    with pytest.raises(FailedPrecondition) as caught:
        await other.append(_entry(3.0))
    assert caught.value.reason == "JOURNAL_TAKEN"
    await redis_client.set(run_key(f"{run_id}-b", "journal"), "no stream")
    with pytest.raises(InvalidInput, match=r"refused.*WRONGTYPE"):
        await Journal(redis_client, f"{run_id}-b").append(_entry(1.0))
