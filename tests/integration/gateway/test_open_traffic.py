"""A group that agents open belongs to the step that finds it closed; idle workers are lent out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio
from integration.gateway.conftest import Ends
from integration.gateway.http_agent import SLOW, Agent, loads, opened, task_run, until_running, user
from watched_stream import ledger_record

from paceline.local.patience import patient
from paceline.services.rollout_gateway.config import GatewayConfig, SessionsConfig
from paceline.streams import Ledger, RedisStream, decode_trajectory, run_key
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

ONE = {"engine": {"workers": 1}}


def redis_keys(url: str, run_id: str) -> dict[str, Any]:
    return {"trajectories": True, "redis": {"durable_url": url}, "run": {"id": run_id}}


def step_request(served: Any, step: int, groups: int = 1) -> rpb.RunTasksRequest:
    return rpb.RunTasksRequest(
        context=tpb.CommandContext(run_id=served.config.run.id, step=step, epoch=1),
        purpose=tpb.PURPOSE_TRAIN,
        environment="external",
        reward="agent",
        open_groups=groups,
    )


async def finished(served: Any, group: str, size: int, rewards: list[float | None]) -> list[str]:
    """Opens and ends sibling sessions of one group; returns their ids."""
    ids = []
    for index, reward in enumerate(rewards):
        agent = await opened(
            served, task_id=f"t-{group}", group_id=group, group_size=size, sample_index=index
        )
        await one_turn(agent, reward)
        ids.append(agent.id)
    return ids


async def one_turn(agent: Agent, reward: float | None) -> None:
    await agent.chat([user("2+2=")])
    await agent.act("complete", {} if reward is None else {"reward": reward})


def samples_of(told: list[Any]) -> dict[str, rpb.SampleFinished]:
    return {event.sample.session_id: event.sample for event in told if event.HasField("sample")}


def closed_of(told: list[Any]) -> list[tuple[str, int]]:
    return [(group.group_id, group.scored_sessions) for group in told[-1].finished.closed_groups]


async def stream_of(client: redis.asyncio.Redis, run_id: str, count: int) -> list[Any]:
    """Waits for the first `count` trajectories."""
    stream = RedisStream(client, run_key(run_id, "trajectories"))
    await stream.create_group("test")
    entries: list[Any] = []
    async with asyncio.timeout(patient(10)):
        while len(entries) < count:
            entries += await stream.read("test", "c", count, 1.0)
    return [decode_trajectory(entry.fields, entry.payload) for entry in entries]


async def test_groups_belong_to_the_step_that_finds_them_closed_also_after_a_restart(
    serve_gateway: Any, redis_url: str, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    keys = redis_keys(redis_url, run_id)
    async with serve_gateway(**ONE, **keys) as served:
        early = await finished(served, "early", 2, [1.0, 0.0])  # before any step: held
        assert (await Ledger(redis_client, run_id).count()).final == 0
        async with task_run(served, step_request(served, 4, groups=2)) as first:
            third = await finished(served, "later", 1, [0.5])
        assert closed_of(first) == [("early", 2), ("later", 1)]
        assert {session: one.reward.value for session, one in samples_of(first).items()} == dict(
            zip([*early, *third], [1.0, 0.0, 0.5], strict=True)
        )
        assert {one.reward.source for one in samples_of(first).values()} == {"agent"}
        await finished(served, "next", 1, [0.25])
        async with task_run(served, step_request(served, 4, groups=2)) as again:
            pass
        assert (closed_of(again), samples_of(again)) == (closed_of(first), samples_of(first))
        async with task_run(served, step_request(served, 5)) as second:
            pass
        assert closed_of(second) == [("next", 1)]
        found = await stream_of(redis_client, run_id, 4)
    assert {one.group_id: one.step for one in found} == {"early": 4, "later": 4, "next": 5}
    assert [one.group_size for one in found if one.group_id == "early"] == [2, 2]
    async with (
        serve_gateway(**ONE, **keys) as served,
        task_run(served, step_request(served, 4, groups=2)) as after,
    ):
        pass
    assert sorted(closed_of(after)) == sorted(closed_of(first))
    for session, sample in samples_of(after).items():
        before = samples_of(first)[session]
        for name in (
            "task_id",
            "group_id",
            "sample_index",
            "reward",
            "response_tokens",
            "prompt_tokens",
            "tokens_hash",
        ):
            assert getattr(sample, name) == getattr(before, name), name
    assert (await Ledger(redis_client, run_id).count()).final == 4


async def test_a_late_sibling_and_a_failed_one_leave_notes(
    serve_gateway: Any,
    redis_url: str,
    redis_client: redis.asyncio.Redis,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SessionsConfig, "group_deadline_s", 0.3)
    keys = redis_keys(redis_url, run_id)
    async with serve_gateway(**ONE, **keys) as served:
        late, failing = [await opened(served, group_id="g", group_size=4) for _ in range(2)]
        async with task_run(served, step_request(served, 2)) as told:
            (good,) = await finished(served, "g", 4, [1.0])
            await failing.chat([user("2+2=")])
            await failing.act("fail", {"reason": "infra"})
        assert closed_of(told) == [("g", 1)]
        assert {session: one.HasField("reward") for session, one in samples_of(told).items()} == {
            good: True,
            failing.id: False,
        }
        await one_turn(late, 1.0)
        assert (await late.show())["state"] == "final"
    ledger = Ledger(redis_client, run_id)
    notes = {agent.id: await ledger_record(ledger, f"{agent.id}/0") for agent in (late, failing)}
    assert {session: (note or {})["reason"] for session, note in notes.items()} == {
        late.id: "late",
        failing.id: "failed:infra",
    }
    assert (await ledger.count()).final == 1


async def test_a_group_without_a_reward_is_left_out_of_the_step(
    serve_gateway: Any, redis_url: str, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    async with serve_gateway(**ONE, **redis_keys(redis_url, run_id)) as served:
        (unscored,) = await finished(served, "nothing", 1, [None])
        async with task_run(served, step_request(served, 7)) as told:
            (scored,) = await finished(served, "something", 1, [0.0])
    assert closed_of(told) == [("something", 1)]
    assert set(samples_of(told)) == {scored}
    record = await ledger_record(Ledger(redis_client, run_id), f"{unscored}/0")
    assert record is not None
    assert (record["reason"], record["step"]) == ("unscored", 7)


async def test_sessions_that_no_step_took_leave_a_note_when_the_gateway_stops(
    serve_gateway: Any, redis_url: str, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    async with serve_gateway(**ONE, **redis_keys(redis_url, run_id)) as served:
        (session,) = await finished(served, "g", 1, [1.0])
    record = await ledger_record(Ledger(redis_client, run_id), f"{session}/0")
    assert record is not None
    assert (record["reason"], record["final"]) == ("no_step", False)


async def test_admission_stops_while_too_much_waits_for_a_step(
    serve_gateway: Any, redis_url: str, run_id: str
) -> None:
    async with serve_gateway(
        **ONE, **redis_keys(redis_url, run_id), max_unsent_bytes=500
    ) as served:
        before = await opened(served)
        await finished(served, "g", 1, [1.0])
        for path, body in (
            ("/v1/sessions", {}),
            ("/v1/sessions", {"claim": True}),
            ("/v1/chat/completions", {"messages": [user("2+2=")]}),
        ):
            refused = await served.http.post(path, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1"), path
        await before.reward(1.0)
        async with task_run(served, step_request(served, 0)) as told:
            pass
        assert closed_of(told) == [("g", 1)]
        await opened(served)


def shares_of(told: list[Any]) -> list[int]:
    return [event.share.worker_index for event in told if event.HasField("share")]


async def test_workers_without_requests_are_lent_out_except_the_last(
    serve_gateway: Any,
    script: dict[str, Any],
    redis_url: str,
    run_id: str,
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GatewayConfig, "release_after_s", 0.2)
    script |= SLOW
    keys = redis_keys(redis_url, run_id)
    async with serve_gateway(engine={"workers": 3}, **keys) as served:
        for step in range(2):
            ends.wait()
            agent = await opened(served, group_id=f"g{step}")
            busy = asyncio.create_task(agent.chat([user("2+2=")], max_tokens=150, ignore_eos=True))
            await until_running(served, 1)
            (worker,) = [index for index, load in enumerate(await loads(served)) if load]
            async with task_run(served, step_request(served, step)) as told:
                await until_shares(served, told, 2)
                assert sorted([worker, *shares_of(told)]) == [0, 1, 2]
                assert not busy.done()
                others = [await opened(served) for _ in range(4)]
                calls = [
                    other.chat([user("1+1=")], max_tokens=20, ignore_eos=True) for other in others
                ]
                more = asyncio.gather(*calls)
                await until_running(served, 5)
                assert (await loads(served))[worker] == 5
                ends.come()
                await more
                await busy
                await agent.act("complete", {"reward": 1.0})
                for other in others:
                    await other.act("abort")
            assert sorted([worker, *shares_of(told)]) == [0, 1, 2]
            shares = [event.share for event in told if event.HasField("share")]
            assert all(0.2 <= share.elapsed_s < patient(20) for share in shares)
            assert samples_of(told)[agent.id].worker_index == worker


async def test_the_earliest_of_the_steps_that_collect_gets_the_next_group(
    serve_gateway: Any,
    redis_url: str,
    redis_client: redis.asyncio.Redis,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GatewayConfig, "release_after_s", 0.05)
    keys = redis_keys(redis_url, run_id)
    async with (
        serve_gateway(engine={"workers": 3}, **keys) as served,
        task_run(served, step_request(served, 5)) as later,
    ):
        await until_shares(served, later, 2)
        async with task_run(served, step_request(served, 4, groups=2)) as earlier:
            await until_shares(served, earlier, 2)
            for name in ("one", "two"):
                await finished(served, name, 1, [1.0])
        assert closed_of(earlier) == told_closed(earlier) == [("one", 1), ("two", 1)]
        assert not samples_of(later)
        await finished(served, "three", 1, [1.0])
        found = await stream_of(redis_client, run_id, 3)
    assert closed_of(later) == told_closed(later) == [("three", 1)]
    assert {one.group_id: one.step for one in found} == {"one": 4, "two": 4, "three": 5}
    assert len(set(shares_of(later))) == len(set(shares_of(earlier))) == 2


def told_closed(told: list[Any]) -> list[tuple[str, int]]:
    """Groups in the order of their reports."""
    closed = [event.closed for event in told if event.WhichOneof("event") == "closed"]
    return [(group.group_id, group.scored_sessions) for group in closed]


async def until_shares(served: Any, told: list[Any], count: int) -> None:
    async with asyncio.timeout(patient(10)):
        while len(shares_of(told)) < count:
            await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))


async def test_a_caller_that_leaves_an_open_step_loses_no_group(
    serve_gateway: Any,
    redis_url: str,
    redis_client: redis.asyncio.Redis,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GatewayConfig, "release_after_s", 0.05)
    async with serve_gateway(**redis_keys(redis_url, run_id)) as served:
        call = served.stub.RunTasks(step_request(served, 1, groups=2), timeout=patient(30))
        await finished(served, "one", 1, [1.0])
        async for event in call:
            if event.HasField("sample"):
                break
        call.cancel()
        async with task_run(served, step_request(served, 1, groups=2)) as told:
            await finished(served, "two", 1, [1.0])
        assert closed_of(told) == [("one", 1), ("two", 1)]
        assert len(await stream_of(redis_client, run_id, 2)) == 2
