"""Records of open sessions on a real Redis: none is lost silently, and none that had ended is
called lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from watched_stream import ledger_record

from paceline.errors import InvalidInput, Unavailable
from paceline.local.patience import patient
from paceline.streams import (
    Ledger,
    OpenSessions,
    api_key_hash,
    connect,
    encode_trajectory,
    open_sessions,
    run_key,
)
from paceline.trajectory import BranchKey, Trajectory, VersionSpan

if TYPE_CHECKING:
    from redis_servers import RedisServer

DEADLINE_S = patient(20)
KEY = "sk-paceline-1"
ABOUT = {
    "step": 3,
    "task_id": "t0",
    "group_id": "g0",
    "group_size": 4,
    "task_index": 1,
    "sample_index": 2,
}

Process = Callable[..., OpenSessions]


@pytest.fixture
async def process(redis_client: redis.asyncio.Redis, run_id: str) -> AsyncIterator[Process]:
    """Each call begins the life of another gateway; no gateway is stopped in order."""
    lives: list[OpenSessions] = []

    def begin(writer: str = "", *, alone: bool = True) -> OpenSessions:
        lives.append(OpenSessions(redis_client, run_id, writer, alone=alone))
        lives[-1].start()
        return lives[-1]

    yield begin
    for life in lives:
        await life.stop(DEADLINE_S)


def branch(
    run_id: str, session_id: str, branch_id: str = "0", reward: float | None = 1.0
) -> Trajectory:
    key = BranchKey(run_id, session_id, branch_id)
    span = (VersionSpan(1, 2, 9),)
    return Trajectory(
        key, 3, "t0", "g0", 4, 1, 2, (5, 6), (0, 1), (0.0, -0.5), span, reward, 11, 1.0
    )


async def test_what_a_killed_process_left_open_is_lost_and_told_once(
    process: Process, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    first = process()
    first.opened("s1", {**ABOUT, "api_key_hash": api_key_hash(KEY), "trainable": True})
    first.opened("s2", ABOUT)
    assert await first.wait_written(DEADLINE_S)
    second = process()
    taken = {record["session_id"]: record for record in await second.take_lost()}
    assert set(taken) == {"s1", "s2"}
    assert {name: taken["s1"][name] for name in ABOUT} == ABOUT
    assert await process().take_lost() == []

    note = await ledger_record(Ledger(redis_client, run_id), "s1/0")
    assert note is not None
    assert (note["final"], note["reason"], note["group_id"], note["sample_index"]) == (
        False,
        "failed:infra",
        "g0",
        2,
    )


async def test_a_gateway_takes_over_its_own_sessions_only_unless_it_is_alone(
    process: Process,
) -> None:
    for number in (0, 1):
        life = process(f"{number}/", alone=False)
        life.opened(f"s{number}", ABOUT)
        assert await life.wait_written(DEADLINE_S)
    (lost,) = await process("1/", alone=False).take_lost()
    assert lost["session_id"] == "s1"
    (lost,) = await process("2/").take_lost()
    assert lost["session_id"] == "s0"


async def test_a_client_that_comes_back_with_its_key_is_told_what_became_of_it(
    process: Process,
) -> None:
    first = process()
    first.opened("s1", {**ABOUT, "api_key_hash": api_key_hash(KEY)})
    assert await first.wait_written(DEADLINE_S)
    later = process()
    assert await later.lost(api_key_hash(KEY)) is None
    await later.take_lost()
    for life in (later, process()):
        found = await life.lost(api_key_hash(KEY))
        assert found is not None
        assert found["session_id"] == "s1"
        assert await life.lost(api_key_hash("sk-other")) is None


def test_the_key_itself_is_not_stored_but_its_sha256() -> None:
    assert api_key_hash(KEY) == hashlib.sha256(KEY.encode()).hexdigest()


async def test_ended_sessions_are_not_lost(process: Process) -> None:
    first = process()
    first.opened("s1", ABOUT)
    first.opened("s2", ABOUT)
    assert await first.wait_written(DEADLINE_S)
    first.ended("s1")
    first.ended("never-opened")
    assert await first.wait_written(DEADLINE_S)
    assert [record["session_id"] for record in await process().take_lost()] == ["s2"]


async def test_sessions_that_are_not_trained_are_not_recorded(process: Process) -> None:
    first = process()
    first.opened("s1", {**ABOUT, "trainable": False})
    assert len(first._waiting) == 0
    assert await first.wait_written(DEADLINE_S)
    assert await process().take_lost() == []


async def test_a_process_does_not_take_its_own_sessions(process: Process) -> None:
    first = process()
    first.opened("mine", ABOUT)
    assert await first.wait_written(DEADLINE_S)
    assert await first.take_lost() == []
    assert [record["session_id"] for record in await process().take_lost()] == ["mine"]


async def test_an_answer_that_was_lost_on_its_way_can_be_asked_for_again(process: Process) -> None:
    first = process()
    first.opened("s1", ABOUT)
    assert await first.wait_written(DEADLINE_S)
    second = process()
    assert await second.take_lost() == await second.take_lost() != []


@pytest.mark.parametrize("branch_id", ["0", "7"])
async def test_a_session_killed_between_its_last_branch_and_its_removal_stays_final(
    process: Process, redis_client: redis.asyncio.Redis, run_id: str, branch_id: str
) -> None:
    first, ledger = process(), Ledger(redis_client, run_id)
    first.opened("s1", {**ABOUT, "api_key_hash": api_key_hash(KEY)})
    assert await first.wait_written(DEADLINE_S)
    ended = branch(run_id, "s1", branch_id)
    await ledger.append_final(ended, *encode_trajectory(ended))
    second = process()
    assert await second.take_lost() == []
    assert await second.lost(api_key_hash(KEY)) is None
    record = await ledger_record(ledger, f"s1/{branch_id}")
    assert record is not None
    assert record["final"] is True
    assert (await ledger_record(ledger, "s1/0") is None) == (branch_id != "0")


async def test_a_session_that_had_ended_unscored_keeps_that_note(
    process: Process, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    first, ledger = process(), Ledger(redis_client, run_id)
    first.opened("s1", ABOUT)
    assert await first.wait_written(DEADLINE_S)
    await ledger.record_unpublished(branch(run_id, "s1", reward=None), "unscored")
    assert await process().take_lost() == []
    record = await ledger_record(ledger, "s1/0")
    assert record is not None
    assert record["reason"] == "unscored"


async def test_the_lost_are_bounded_and_the_latest_are_kept(
    process: Process,
    redis_client: redis.asyncio.Redis,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_sessions, "LOST_KEPT", 3)
    for life in range(3):
        one = process()
        for number in range(2):
            name = f"s{life}-{number}"
            one.opened(name, {**ABOUT, "api_key_hash": api_key_hash(name)})
        assert await one.wait_written(DEADLINE_S)
        await process().take_lost()
    last = process()
    kept = [
        name
        for name in ("s0-0", "s0-1", "s1-0", "s1-1", "s2-0", "s2-1")
        if await last.lost(api_key_hash(name))
    ]
    assert kept == ["s1-1", "s2-0", "s2-1"]
    for key in ("sessions:lost", "sessions:lost:keys", "sessions:lost:at"):
        assert 0 < await redis_client.ttl(run_key(run_id, key)) <= open_sessions.LOST_KEPT_S
    assert await redis_client.hlen(run_key(run_id, "sessions:lost:keys")) == 3


async def test_the_lost_expire(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    first = process()
    first.opened("s1", {**ABOUT, "api_key_hash": api_key_hash(KEY)})
    assert await first.wait_written(DEADLINE_S)
    await process().take_lost()
    now = open_sessions.time.time()
    monkeypatch.setattr(open_sessions.time, "time", lambda: now + open_sessions.LOST_KEPT_S + 1)
    later = process()
    assert await later.take_lost() == []
    assert await later.lost(api_key_hash(KEY)) is None


async def test_a_session_that_is_recorded_survives_a_kill_at_once(process: Process) -> None:
    first = process()
    for number in range(open_sessions.BATCH):
        first.opened(f"s{number}", ABOUT)
    first.opened("late", ABOUT)
    assert await first.wait_written(DEADLINE_S, "late")
    assert "late" in {record["session_id"] for record in await process().take_lost()}


async def test_a_key_used_again_names_the_session_lost_last(process: Process) -> None:
    for name in ("s1", "s2"):
        life = process()
        life.opened(name, {**ABOUT, "api_key_hash": api_key_hash(KEY)})
        assert await life.wait_written(DEADLINE_S)
        await process().take_lost()
    found = await process().lost(api_key_hash(KEY))
    assert found is not None
    assert found["session_id"] == "s2"


async def test_text_of_any_kind_survives(process: Process) -> None:
    record = {
        "task_id": "a\nb\r\n\u2028\x00ü\\n",
        "nested": {"empty": [], "big": 2**62 + 1, "half": 0.5},
    }
    first = process()
    first.opened("s1", record)
    assert await first.wait_written(DEADLINE_S)
    (taken,) = await process().take_lost()
    assert {name: taken[name] for name in record} == record


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"what": object()}, "not JSON"),
        ({"what": float("nan")}, "not JSON"),
        ({"what": "x" * 20_000}, "too long; seen: 20"),
    ],
)
async def test_a_record_that_cannot_be_kept_is_refused_at_once(
    process: Process, record: dict[str, Any], message: str
) -> None:
    life = process()
    with pytest.raises(InvalidInput, match=message):
        life.opened("s1", record)
    assert len(life._waiting) == 0


async def test_without_redis_nothing_is_kept() -> None:
    life = OpenSessions(None, "r")
    life.start()
    life.opened("s1", ABOUT)
    life.ended("s1")
    assert (
        len(life._waiting),
        await life.take_lost(),
        await life.lost("x"),
    ) == (0, [], None)
    await life.stop(1)


async def test_an_outage_delays_records_and_loses_none(
    durable_server: RedisServer, run_id: str
) -> None:
    client = connect(durable_server.url, outage_s=0.1)
    life = OpenSessions(client, run_id)
    life.start()
    life.opened("before", ABOUT)
    life.opened("ends-in-the-outage", ABOUT)
    assert await life.wait_written(DEADLINE_S)
    durable_server.kill()
    life.opened("during", ABOUT)
    assert await life.wait_written(0, "before")
    assert not await life.wait_written(0.01, "during")
    for number in range(1000):
        life.opened(f"short-{number}", ABOUT)
    await asyncio.sleep(0)  # a first batch is on its way
    for number in range(1000):
        life.ended(f"short-{number}")
    life.ended("ends-in-the-outage")
    assert len(life._waiting) <= open_sessions.BATCH + 2
    with pytest.raises(Unavailable, match="does not answer"):
        await OpenSessions(client, run_id).take_lost()
    assert not await life.wait_written(0.01)
    durable_server.start_without_waiting()
    assert await life.wait_written(DEADLINE_S, "during")
    assert await life.wait_written(DEADLINE_S)
    again = OpenSessions(connect(durable_server.url), run_id)
    assert {record["session_id"] for record in await again.take_lost()} == {"before", "during"}
    await life.stop(1)
    await client.aclose()


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["open", "end", "final", "write", "kill"]), st.integers(0, 4)),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(operations=OPERATIONS)
def test_every_session_is_lost_once_or_ended(
    redis_server: RedisServer, operations: list[tuple[str, int]]
) -> None:
    """Checks against a model of Redis's state at each kill; ids are used once, as the gateway's
    are.
    """
    asyncio.run(_run_model(redis_server.url, operations))


async def _run_model(redis_url: str, operations: list[tuple[str, int]]) -> None:
    client = connect(redis_url)
    run_id = f"test-{hashlib.sha256(json.dumps(operations).encode()).hexdigest()[:20]}"
    ledger, life, lives = Ledger(client, run_id), OpenSessions(client, run_id), 0
    life.start()
    open_now: set[str] = set()
    used: set[str] = set()
    for operation, number in [*operations, ("kill", 0)]:
        name = f"s{lives}-{number}"
        match operation:
            case "open" if name not in used:
                life.opened(name, ABOUT)
                open_now.add(name)
                used.add(name)
            case "end":
                life.ended(name)
                open_now.discard(name)
            case "final" if name in open_now:
                ended = branch(run_id, name)
                await ledger.append_final(ended, *encode_trajectory(ended))
                open_now.discard(name)
            case "write":
                assert await life.wait_written(DEADLINE_S)
            case "kill":
                await life.stop(DEADLINE_S)
                life, lives = OpenSessions(client, run_id), lives + 1
                life.start()
                assert {record["session_id"] for record in await life.take_lost()} == open_now
                for lost in open_now:
                    assert (await ledger_record(ledger, f"{lost}/0") or {})[
                        "reason"
                    ] == "failed:infra"
                open_now = set()
    await life.stop(DEADLINE_S)
    await client.aclose()
