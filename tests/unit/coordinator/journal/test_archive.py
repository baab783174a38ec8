"""Entries behind a snapshot move from the journal's stream to its archive; every reader still finds
all entries.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import redis.asyncio

from benchmarks.growth_coordinator import JournaledRun
from paceline.errors import DataLoss, FailedPrecondition
from paceline.report.journal import copy_journal, read_history
from paceline.services.coordinator.journal.entry import JournalEntry
from paceline.services.coordinator.journal.journal import (
    Journal,
    Snapshot,
    pack_snapshot,
    unpack_snapshot,
)
from paceline.services.coordinator.journal.records import Carried
from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.state import (
    DrawnStep,
    LearnerTrack,
    Portion,
    RolloutTrack,
    State,
)
from paceline.streams import run_key
from paceline.streams.journal import journal_lines, unpack_entry

STEPS = 6


def _entry(at_s: float) -> JournalEntry:
    return JournalEntry(events.StopRequested(at_s), 0, "ready")


def _snapshot(entries: int) -> Snapshot:
    return Snapshot(entries, 0.0, {}, State(), Carried(), {}, None)


def test_a_snapshot_holds_a_step_of_tens_of_thousands_of_groups() -> None:
    """A bit each: more digits than Python writes in base ten."""
    every = (1 << 30_000) - 1
    drawn = DrawnStep(0, 0, closed=every >> 1, taken=every >> 2, places=every)
    learner = LearnerTrack(batch=(Portion(0, every >> 2),))
    state = State(rollouts=RolloutTrack(draws=(drawn,)), learner=learner)
    snapshot = replace(_snapshot(1), state=state)
    assert unpack_snapshot(pack_snapshot(snapshot)) == snapshot


async def _numbers(client: redis.asyncio.Redis, run_id: str, after: int = 0) -> list[int]:
    return [int(unpack_entry(line)["at_s"]) async for line in journal_lines(client, run_id, after)]


async def _written(client: redis.asyncio.Redis, run_id: str, entries: int) -> Journal:
    """Write a journal of numbered entries."""
    journal = Journal(client, run_id)
    await journal.append(*(_entry(number) for number in range(1, entries + 1)))
    return journal


async def test_the_stream_keeps_what_follows_the_snapshot_and_readers_find_all(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    journal = await _written(redis_client, run_id, 7)
    await journal.save(_snapshot(5), [])
    assert await redis_client.xlen(run_key(run_id, "journal")) == 2
    await journal.append(_entry(8), _entry(9))
    await journal.save(_snapshot(9), [])
    assert await redis_client.xlen(run_key(run_id, "journal")) == 0
    await journal.append(_entry(10))
    for after in range(11):
        wanted = list(range(after + 1, 11))
        assert await _numbers(redis_client, run_id, after) == wanted
    again = Journal(redis_client, run_id)
    assert await again.newest() == (_snapshot(9), [])
    assert [one.event.at_s async for one in again.entries()] == [10.0]
    await again.append(_entry(11))


async def test_a_reader_is_not_disturbed_by_a_snapshot_that_is_written_meanwhile(
    redis_client: redis.asyncio.Redis, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = await _written(redis_client, run_id, 30)
    monkeypatch.setattr("paceline.streams.journal._PAGE", 4)
    found = []
    async for line in journal_lines(redis_client, run_id):
        found.append(int(unpack_entry(line)["at_s"]))
        if found[-1] % 7 == 0:
            await journal.save(_snapshot(found[-1] + 1), [])
    assert found == list(range(1, 31))


async def test_the_report_of_an_archived_journal_is_that_of_one_kept_whole(
    redis_client: redis.asyncio.Redis, run_id: str, tmp_path: Path
) -> None:
    for name, snapshot_entries in (("whole", 10_000), ("archived", 20)):
        course = JournaledRun(redis_client, f"{run_id}-{name}", STEPS, snapshot_entries)
        for _ in range(STEPS):
            await course.step(16)
        await copy_journal(redis_client, f"{run_id}-{name}", tmp_path / name)
    whole, archived = [tmp_path / name for name in ("whole", "archived")]
    assert await redis_client.xlen(run_key(f"{run_id}-archived", "journal")) < 30
    assert await redis_client.xlen(run_key(f"{run_id}-archived", "journal:archive")) == 3
    assert archived.read_bytes() == whole.read_bytes()
    assert len(read_history(archived).records) == STEPS


async def test_a_snapshot_whose_answer_was_lost_is_written_once(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    first = await _written(redis_client, run_id, 5)
    again = Journal(redis_client, run_id)
    assert len([one async for one in again.entries()]) == 5
    await first.save(_snapshot(4), [])
    await again.save(_snapshot(4), [])
    assert await redis_client.xlen(run_key(run_id, "journal:archive")) == 1
    assert again.since_snapshot == 1
    assert await _numbers(redis_client, run_id) == [1, 2, 3, 4, 5]


async def test_a_coordinator_that_was_left_behind_writes_neither_entries_nor_a_snapshot(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    left, goes_on = await _written(redis_client, run_id, 5), Journal(redis_client, run_id)
    assert len([one async for one in goes_on.entries()]) == 5
    await goes_on.append(_entry(6), _entry(7))
    await goes_on.save(_snapshot(7), [])
    with pytest.raises(FailedPrecondition, match="another coordinator"):
        await left.save(_snapshot(5), [])
    with pytest.raises(FailedPrecondition, match="another coordinator"):
        await left.append(_entry(6), _entry(7))
    assert await _numbers(redis_client, run_id) == [1, 2, 3, 4, 5, 6, 7]
    newest = await Journal(redis_client, run_id).newest()
    assert newest == (_snapshot(7), [])


async def test_an_archive_that_is_damaged_or_has_a_gap_says_so(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    journal = await _written(redis_client, run_id, 6)
    for last in (2, 4):
        await journal.save(_snapshot(last), [])
    archive = run_key(run_id, "journal:archive")
    await redis_client.xdel(archive, "2-0")
    with pytest.raises(DataLoss, match="the journal has a gap; seen: 3; allowed: 1"):
        await _numbers(redis_client, run_id)
    await redis_client.delete(archive)
    with pytest.raises(DataLoss, match="the journal has a gap; seen: 5; allowed: 1"):
        await _numbers(redis_client, run_id)
    await redis_client.xadd(archive, {"entries": b"no zlib"}, id="4-0")
    with pytest.raises(DataLoss, match="archived journal entries do not unpack"):
        await _numbers(redis_client, run_id)
