"""The ledger on a real Redis: once per branch, and every final branch accounted for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis.asyncio
from watched_stream import WatchedStream, ledger_record

from paceline.streams import Ledger, LedgerCount, encode_trajectory, run_key
from paceline.trajectory import BranchKey, Trajectory, VersionSpan


@pytest.fixture
def ledger(redis_client: redis.asyncio.Redis, run_id: str) -> Ledger:
    return Ledger(redis_client, run_id)


@pytest.fixture
def stream(redis_client: redis.asyncio.Redis, run_id: str) -> WatchedStream:
    return WatchedStream(redis_client, run_key(run_id, "trajectories"))


def _branch(run_id: str, n: int, step: int = 3) -> Trajectory:
    return Trajectory(
        key=BranchKey(run_id, f"s{n}"),
        step=step,
        task_id="t0",
        group_id="g0",
        group_size=4,
        task_index=1,
        sample_index=n,
        token_ids=(5, 6, 7),
        loss_mask=(0, 1, 1),
        behavior_logprobs=(0.0, -0.5, -0.25),
        version_spans=(VersionSpan(1, 3, 9),),
        reward=1.0,
        seed=11,
        temperature=1.0,
    )


async def _append(ledger: Ledger, run_id: str, count: int) -> list[str]:
    branches = [_branch(run_id, n) for n in range(count)]
    for branch in branches:
        assert await ledger.append_final(branch, *encode_trajectory(branch))
    return [str(branch.key) for branch in branches]


async def test_a_branch_is_appended_once(
    ledger: Ledger, stream: WatchedStream, run_id: str
) -> None:
    branch = _branch(run_id, 0)
    fields, payload = encode_trajectory(branch)
    assert await ledger.append_final(branch, fields, payload) is True
    assert await ledger.append_final(branch, fields, payload) is False
    changed = replace(branch, reward=2.0)
    assert await ledger.append_final(changed, *encode_trajectory(changed)) is False
    record = await ledger_record(ledger, str(branch.key))
    assert record is not None
    assert record["reward"] == 1.0
    assert (await stream.depth()).entries == 1
    assert await ledger.count() == LedgerCount(1, 0, {}, 1, 0)


async def test_a_record_tells_how_many_branches_its_session_has(
    ledger: Ledger, run_id: str
) -> None:
    branch = replace(_branch(run_id, 0), branch_count=3)
    await ledger.append_final(branch, *encode_trajectory(branch))
    record = await ledger_record(ledger, str(branch.key))
    assert record is not None
    assert record["branch_count"] == 3


async def test_a_branch_appended_again_after_training_stays_trained(
    ledger: Ledger, stream: WatchedStream, run_id: str
) -> None:
    (key,) = await _append(ledger, run_id, 1)
    await stream.create_group("policy")
    (entry,) = await stream.read("policy", "c", 1, 0)
    await ledger.mark_trained([key], 3)
    await stream.ack("policy", [entry.id])
    branch = _branch(run_id, 0)
    assert await ledger.append_final(branch, *encode_trajectory(branch)) is False
    assert await ledger.count() == LedgerCount(1, 1, {}, 0, 0)


async def test_every_final_branch_has_one_fate(
    ledger: Ledger, stream: WatchedStream, run_id: str
) -> None:
    keys = await _append(ledger, run_id, 6)
    await stream.create_group("policy")
    entries = await stream.read("policy", "c", 10, 0)
    await ledger.mark_trained(keys[:2], 3)
    await ledger.mark_dropped({keys[2]: "stale", keys[3]: "group_closed", keys[4]: "stale"})
    await stream.ack("policy", [entry.id for entry in entries[:5]])
    assert await ledger.count() == LedgerCount(6, 2, {"stale": 2, "group_closed": 1}, 1, 0)


async def test_an_entry_deleted_by_hand_counts_as_lost(
    ledger: Ledger, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    await _append(ledger, run_id, 3)
    name = run_key(run_id, "trajectories")
    ((entry_id, _),) = await redis_client.xrange(name, count=1)
    assert await redis_client.xdel(name, entry_id) == 1
    assert await ledger.count() == LedgerCount(3, 0, {}, 2, 1)


async def test_a_trained_branch_is_not_open_while_its_entry_still_lies_there(
    ledger: Ledger, run_id: str
) -> None:
    keys = await _append(ledger, run_id, 2)
    await ledger.mark_trained(keys[:1], 3)
    assert await ledger.count() == LedgerCount(2, 1, {}, 1, 0)


async def test_an_empty_run_counts_nothing(ledger: Ledger) -> None:
    assert await ledger.count() == LedgerCount(0, 0, {}, 0, 0)
    assert await ledger_record(ledger, "s0/0") is None
    assert await ledger.finals(0) == []


async def test_an_unpublished_branch_is_recorded_and_not_final(
    ledger: Ledger, stream: WatchedStream, run_id: str
) -> None:
    branch = replace(_branch(run_id, 0), reward=None)
    await ledger.record_unpublished(branch, "unscored")
    record = await ledger_record(ledger, str(branch.key))
    assert record is not None
    assert (record["final"], record["reason"], record["reward"]) == (False, "unscored", None)
    assert await ledger.count() == LedgerCount(0, 0, {}, 0, 0, {"unscored": 1})
    assert (await stream.depth()).entries == 0


async def test_an_unpublished_branch_may_become_final_but_never_back(
    ledger: Ledger, run_id: str
) -> None:
    branch = _branch(run_id, 0)
    await ledger.record_unpublished(branch, "unscored")
    await ledger.append_final(branch, *encode_trajectory(branch))
    await ledger.record_unpublished(branch, "aborted")
    record = await ledger_record(ledger, str(branch.key))
    assert record is not None
    assert record["final"] is True
    assert (record["tokens"], record["trained_tokens"], record["policy_versions"]) == (3, 2, [9])
    assert await ledger.count() == LedgerCount(1, 0, {}, 1, 0)


async def test_finals_of_a_step_come_sorted_by_task_and_sample(ledger: Ledger, run_id: str) -> None:
    for n, step in ((2, 3), (0, 3), (1, 4), (3, 3)):
        branch = _branch(run_id, n, step)
        await ledger.append_final(branch, *encode_trajectory(branch))
    assert [record["sample_index"] for record in await ledger.finals(3)] == [0, 2, 3]
    assert [record["key"] for record in await ledger.finals(4)] == ["s1/0"]


async def _elements(client: redis.asyncio.Redis, run_id: str) -> int:
    """Branches in all keys of the ledger together."""
    key = run_key(run_id, "ledger")
    hashes = [await client.hlen(f"{key}{name}") for name in ("", ":undecided", ":fates")]
    return sum(hashes) + int(await client.zcard(f"{key}:steps"))


async def test_compacted_steps_leave_their_totals_and_no_branch(
    ledger: Ledger, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    keys = await _append(ledger, run_id, 2500)  # more than a page
    await ledger.mark_trained(keys[:1200], 3)
    await ledger.mark_dropped(dict.fromkeys(keys[1200:], "stale"))
    await ledger.record_unpublished(_branch(run_id, 9001), "unscored")
    later = _branch(run_id, 9002, step=4)
    await ledger.append_final(later, *encode_trajectory(later))
    before = await ledger.count()
    assert before == LedgerCount(2501, 1200, {"stale": 1300}, 1, 0, {"unscored": 1})
    await ledger.compact(3)
    assert await ledger.count() == before
    assert await ledger.finals(3) == []
    assert len(await ledger.finals(4)) == 1
    assert await _elements(redis_client, run_id) == 3


async def test_what_has_no_fate_outlives_the_compaction_of_its_step_until_it_has_one(
    ledger: Ledger, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    keys = await _append(ledger, run_id, 3)
    await ledger.mark_trained(keys[:1], 3)
    name = run_key(run_id, "trajectories")
    assert await redis_client.xdel(name, (await redis_client.xrevrange(name, count=1))[0][0]) == 1
    await ledger.compact(3)
    assert await ledger.count() == LedgerCount(3, 1, {}, 1, 1)
    assert [record["key"] for record in await ledger.finals(3)] == ["s1/0", "s2/0"]
    await ledger.mark_dropped(dict.fromkeys(keys[1:], "stale"))
    await ledger.compact(4)
    assert await ledger.count() == LedgerCount(3, 1, {"stale": 2}, 0, 0)
    assert await _elements(redis_client, run_id) == 0


async def test_a_branch_of_a_compacted_step_never_comes_back_into_the_stream(
    ledger: Ledger, stream: WatchedStream, run_id: str
) -> None:
    keys = await _append(ledger, run_id, 2)
    await stream.create_group("policy")
    entries = await stream.read("policy", "c", 10, 0)
    await ledger.mark_trained(keys, 3)
    await stream.ack("policy", [entry.id for entry in entries])
    await ledger.compact(3)
    late = _branch(run_id, 0)
    for _ in range(2):
        assert await ledger.append_final(late, *encode_trajectory(late)) is False
    assert (await stream.depth()).entries == 0
    assert await ledger.count() == LedgerCount(3, 2, {"late": 1}, 0, 0)


async def test_marks_and_compactions_that_are_repeated_change_nothing(
    ledger: Ledger, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    keys = await _append(ledger, run_id, 3)
    for through in (2, 3, 3, 1):
        await ledger.mark_trained(keys[:2], 3)
        await ledger.mark_dropped({keys[1]: "stale", keys[2]: "stale", "unknown/0": "stale"})
        await ledger.compact(through)
    assert await ledger.count() == LedgerCount(3, 2, {"stale": 1}, 0, 0)
    assert await _elements(redis_client, run_id) == 0
    next_one = _branch(run_id, 7, step=4)
    assert await ledger.append_final(next_one, *encode_trajectory(next_one)) is True


async def test_runs_do_not_see_each_other(
    redis_client: redis.asyncio.Redis, ledger: Ledger, run_id: str
) -> None:
    await _append(ledger, run_id, 2)
    assert (await Ledger(redis_client, f"{run_id}-b").count()).final == 0
