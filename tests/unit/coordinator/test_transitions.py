"""Waiting events are decided, written and published together, with the result of one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio
from redis_servers import foreign_redis

from paceline.errors import DataLoss, InternalError, ResourceExhausted
from paceline.services.coordinator.journal.journal import Journal
from paceline.services.coordinator.machine import events
from paceline.services.coordinator.machine.events import Event
from paceline.services.coordinator.machine.settings import RunSettings
from paceline.services.coordinator.transitions import Transitions
from paceline.streams import connect, run_key
from paceline.streams.journal import journal_lines
from paceline.trajectory import VersionSet
from paceline.v1.coordinator_pb2 import Fact

SETTINGS = RunSettings(workers=2, total_steps=2, training_interval_steps=1)
TRACE = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
HAPPENED: list[Event] = [
    events.RunStarted(0.0, SETTINGS, VersionSet()),
    events.StepBegan(1.0, 0, TRACE),
    events.ShareDone(2.0, 1, 1),
    events.DrafterActivated(2.5, 2),
    events.TasksFinished(3.0, 1, {"response_tokens": 50, "pulls": {"off": 3}}),
    events.Preempted(3.5, 2),
    events.PolicyStepped(4.0, 3, 1, {"loss": 0.5}),
    events.PolicyPrepared(4.5, 3, 1),
    events.Committed(5.0, VersionSet(1, 1, 0)),
    events.StepBegan(5.5, 1),
    events.ShareDone(6.0, 4, 0),
]


class Run:
    """Transitions of one run, and the messages that they send."""

    def __init__(self, client: redis.asyncio.Redis, run_id: str, snapshot_entries: int = 5) -> None:
        self.told: list[list[Fact]] = []
        journal = Journal(client, run_id)
        self.transitions = Transitions(run_id, 8, 0.3, snapshot_entries, journal, self._publish)

    async def _publish(self, *facts: Fact) -> None:
        self.told.append(list(facts))

    @property
    def facts(self) -> list[Fact]:
        return [fact for message in self.told for fact in message]

    def standing(self) -> tuple[object, ...]:
        run = self.transitions
        return run.state, run.records.finished, run.records.carried(), run.at_s, run.traceparents


async def entries(client: redis.asyncio.Redis, run_id: str) -> list[bytes]:
    return [line async for line in journal_lines(client, run_id)]


def cuts(count: int) -> Iterator[list[list[Event]]]:
    """Yield HAPPENED in lists of each size, and as one list."""
    for size in (1, 2, 3, count):
        yield [HAPPENED[first : first + size] for first in range(0, count, size)]


async def test_events_that_are_applied_together_lead_where_they_lead_one_by_one(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    for number, cut in enumerate(cuts(len(HAPPENED))):
        run = Run(redis_client, f"{run_id}-{number}")
        for together in cut:
            assert [one.event for one in await run.transitions.apply(*together)] == together
        assert len(run.told) <= len(cut)
        again = Run(redis_client, f"{run_id}-{number}")
        await again.transitions.replay()
        if not number:
            alone, lines = run, await entries(redis_client, f"{run_id}-0")
            for fact in alone.facts:
                fact.context.run_id = ""
        for fact in run.facts:
            fact.context.run_id = ""
        assert await entries(redis_client, f"{run_id}-{number}") == lines
        assert run.facts == alone.facts
        assert run.standing() == again.standing() == alone.standing()


async def test_of_events_that_do_not_enter_the_journal_nobody_hears_and_nothing_changes(
    tmp_path: Path, run_id: str
) -> None:
    with foreign_redis(tmp_path / "r") as url:
        client = connect(url)
        run = Run(client, run_id)
        await run.transitions.apply(HAPPENED[0])
        told, before = len(run.told), run.transitions.state
        await client.config_set("maxmemory", "1")
        with pytest.raises(ResourceExhausted):
            await run.transitions.apply(*HAPPENED[1:4])
        assert (len(run.told), run.transitions.state) == (told, before)
        assert len(await entries(client, run_id)) == 1
        await client.aclose()


async def test_an_illegal_event_ends_the_run_after_those_before_it_are_durable_and_told(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    run = Run(redis_client, run_id)
    with pytest.raises(InternalError, match=r"PolicyPrepared.*rollout") as caught:
        await run.transitions.apply(*HAPPENED[:3], events.PolicyPrepared(2.2, 9, 1), HAPPENED[3])
    assert caught.value.reason == "ILLEGAL_EVENT"
    assert run.transitions.state.doing == "rollout"
    assert len(run.told) == 1
    again = Run(redis_client, run_id)
    await again.transitions.replay()
    assert again.standing() == run.standing()
    assert len(await entries(redis_client, run_id)) == 3


async def test_a_journal_with_entries_of_another_run_is_not_taken_up(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    ours, theirs = (Run(redis_client, f"{run_id}-{name}") for name in ("ours", "theirs"))
    await ours.transitions.apply(*HAPPENED[:2])
    await theirs.transitions.apply(*HAPPENED)
    lines = await entries(redis_client, f"{run_id}-theirs")
    key = run_key(f"{run_id}-ours", "journal")
    for foreign, says in (
        (lines[7], "entry 3 of run .* does not follow .*PolicyPrepared"),
        (lines[10], "entry 3 of run .* as if of another run; seen: step 1; allowed: 0"),
    ):
        await redis_client.xadd(key, {"entry": foreign}, id="3-0")
        with pytest.raises(DataLoss, match=says):
            await Run(redis_client, f"{run_id}-ours").transitions.replay()
        await redis_client.xdel(key, "3-0")
        await redis_client.execute_command("XSETID", key, "2-0")


async def test_an_illegal_event_alone_is_neither_written_nor_told(
    redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    run = Run(redis_client, run_id)
    with pytest.raises(InternalError, match="StepBegan"):
        await run.transitions.apply(HAPPENED[1])
    assert run.told == []
    assert await entries(redis_client, run_id) == []
