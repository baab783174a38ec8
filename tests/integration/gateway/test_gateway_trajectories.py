"""Finished branches reach the ledger once despite faults, and rows follow; sessions keep exact
tokens.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import redis.asyncio
from integration.gateway.conftest import Ends
from integration.gateway.http_agent import Agent, claimed, opened, task_run, user
from watched_stream import ledger_record

from examples.scripted_engine.script import scripted_logprob, scripted_rows
from paceline.local.patience import patient
from paceline.streams import Ledger, RedisStream, decode_features, decode_trajectory, run_key
from paceline.trajectory import request_seed
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1.trajectory_pb2 import SamplingParams


def redis_keys(url: str, run_id: str) -> dict[str, Any]:
    return {"trajectories": True, "redis": {"durable_url": url}, "run": {"id": run_id}}


async def run_tasks(served: Any, **options: Any) -> dict[tuple[str, int], rpb.SampleFinished]:
    news = [
        one
        async for one in served.stub.RunTasks(served.tasks_request(**options), timeout=patient(30))
    ]
    assert news[-1].HasField("finished")
    return {
        (one.sample.task_id, one.sample.sample_index): one.sample
        for one in news
        if one.HasField("sample")
    }


async def appended(client: redis.asyncio.Redis, run_id: str, name: str, count: int) -> list[Any]:
    """Waits for the first `count` entries of a stream."""
    stream = RedisStream(client, run_key(run_id, name))
    await stream.create_group("test")
    entries: list[Any] = []
    async with asyncio.timeout(patient(15)):
        while len(entries) < count:
            entries += await stream.read("test", "c", count, 1.0)
    return entries


async def test_training_samples_become_trajectories_and_hidden_rows(
    serve_gateway: Any, redis_url: str, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    async with serve_gateway(**redis_keys(redis_url, run_id)) as served:
        found = await run_tasks(served, step=3, capture=True)
        entries = await appended(redis_client, run_id, "trajectories", 4)
        for trajectory in (decode_trajectory(entry.fields, entry.payload) for entry in entries):
            sample = found[trajectory.task_id, trajectory.sample_index]
            assert (trajectory.step, trajectory.group_size) == (3, 2)
            assert trajectory.key.session_id == sample.session_id
            assert trajectory.reward == sample.reward.value
            assert trajectory.seed == request_seed(
                7, 3, trajectory.task_id, trajectory.sample_index
            )
            prompt = served.codec.encode("1+1=" if trajectory.task_id == "a" else "2+2=")
            assert trajectory.token_ids[: len(prompt)] == prompt
            assert trajectory.loss_mask == (0,) * 5 + (1,) * sample.response_tokens
            expected = [0.0] * 5 + [scripted_logprob(token) for token in trajectory.token_ids[5:]]
            assert list(trajectory.behavior_logprobs) == expected
            (span,) = trajectory.version_spans
            assert (span.start, span.end, span.policy_version) == (5, len(trajectory.token_ids), 0)
        for entry in await appended(redis_client, run_id, "features", 4):
            batch = decode_features(entry.fields, entry.payload)
            assert batch.positions.tolist() == list(range(batch.rows))
            assert batch.mask.tolist() == [0] * 5 + [1] * (batch.rows - 5)
            tokens = batch.token_ids[:-1].astype(np.uint32)
            expected_rows = scripted_rows(tokens, batch.positions.astype(np.uint32), 8, "bfloat16")
            assert bytes(batch.hidden.data) == expected_rows.tobytes()
            assert batch.lm_head_hash


async def test_the_parts_of_a_mixed_reward_are_in_sample_ledger_and_stream_and_outlive_a_restart(
    serve_gateway: Any, redis_url: str, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    keys = redis_keys(redis_url, run_id) | {
        "rewards": {"mixtures": {"both": {"math_answer": 1.0, "format": 0.5}}}
    }
    async with serve_gateway(**keys) as served:
        found = await run_tasks(served, reward="both")
        entries = await appended(redis_client, run_id, "trajectories", 4)
        for one in (decode_trajectory(entry.fields, entry.payload) for entry in entries):
            sample = found[one.task_id, one.sample_index]
            assert sorted(one.reward_parts) == ["format", "math_answer"]
            assert one.reward == one.reward_parts["math_answer"] + 0.5 * one.reward_parts["format"]
            assert dict(sample.reward.parts) == one.reward_parts
            record = await ledger_record(Ledger(redis_client, run_id), str(one.key))
            assert record is not None
            assert record["reward_parts"] == one.reward_parts
    async with serve_gateway(**keys) as served:
        after = await run_tasks(served, reward="both")
    assert {key: one.reward for key, one in after.items()} == {
        key: one.reward for key, one in found.items()
    }


async def test_a_generation_of_a_capture_group_has_hidden_rows_and_no_trajectory(
    serve_gateway: Any, redis_url: str, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    async with serve_gateway(**redis_keys(redis_url, run_id)) as served:
        sampling = SamplingParams(temperature=0.5, max_tokens=6)
        request = rpb.GenerateRequest(text="1+1=", sampling=sampling, capture_group="mine")
        pieces = [one async for one in served.stub.Generate(request, timeout=patient(15))]
        drawn = [token for piece in pieces for token in piece.chunk.token_ids]
        (entry,) = await appended(redis_client, run_id, "features", 1)
        batch = decode_features(entry.fields, entry.payload)
        assert (batch.group_id, batch.temperature) == ("mine", 0.5)
        assert batch.token_ids.tolist()[-len(drawn) :] == drawn
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
        assert status.open_sessions == 0
        count = await Ledger(redis_client, run_id).count()
        assert (count.final, count.unpublished) == (0, {})


async def test_a_share_of_the_requests_chosen_by_their_seeds_is_captured(
    serve_gateway: Any, redis_url: str, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    async with serve_gateway(**redis_keys(redis_url, run_id), features={"share": 0.5}) as served:
        found = await run_tasks(served, step=3, capture=True, samples_per_task=8)
        seeds = {key: request_seed(7, 3, *key) for key in found}
        chosen = {found[key].session_id for key, seed in seeds.items() if seed % 10_000 < 5_000}
        assert 0 < len(chosen) < len(found) == 16
        entries = await appended(redis_client, run_id, "features", len(chosen))
        assert {
            decode_features(entry.fields, entry.payload).session_id for entry in entries
        } == chosen


async def test_repeated_calls_append_nothing_new_even_after_a_restart(
    serve_gateway: Any, redis_url: str, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    keys = redis_keys(redis_url, run_id)
    async with serve_gateway(**keys) as served:
        first = await run_tasks(served)
        again = await run_tasks(served)
        assert again == first
    async with serve_gateway(**keys) as served:
        after = await run_tasks(served)
        generated = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
        assert sum(worker.health.tokens_emitted for worker in generated.workers) == 0
    for key, sample in first.items():
        assert (after[key].reward, after[key].response_tokens) == (
            sample.reward,
            sample.response_tokens,
        )
        assert after[key].tokens_hash == sample.tokens_hash
    assert (await Ledger(redis_client, run_id).count()).final == 4


async def test_a_second_caller_takes_over_the_samples_of_one_that_left(
    serve_gateway: Any,
    script: dict[str, Any],
    redis_url: str,
    redis_client: redis.asyncio.Redis,
    run_id: str,
    ends: Ends,
) -> None:
    script |= {"real_time": True, "default_cost_s": 0.05, "costs_s": {}, "arms": ["off"]}
    async with serve_gateway(**redis_keys(redis_url, run_id)) as served:
        left = served.stub.RunTasks(served.tasks_request(), timeout=patient(30))
        async with asyncio.timeout(patient(5)):
            while (
                not (await served.stub.GetStatus(rpb.GetStatusRequest())).workers[0].health.running
            ):
                pass
        left.cancel()
        ends.come()
        assert len(await run_tasks(served)) == 4
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
        once = 2 * (len("1+1=2 #2") + 1) + 2 * (len("2+2=5 #5") + 1)
        assert sum(worker.health.tokens_emitted for worker in status.workers) == once


def external(served: Any) -> rpb.RunTasksRequest:
    """One sample of one task that an agent claims and rewards."""
    request: rpb.RunTasksRequest = served.tasks_request(
        environment="external", reward="agent", samples_per_task=1
    )
    del request.tasks[1:]
    return request


async def claim(served: Any) -> Agent:
    agent = await claimed(served)
    assert agent is not None
    return agent


async def continued(agent: Agent, prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens that the model adds to a prompt."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "seed": 2, "return_token_ids": True}
    answer = await agent.post("/v1/completions", body)
    return list(answer["choices"][0]["token_ids"])


async def test_nothing_is_lost_while_redis_is_away_and_admission_stops_at_the_limit(
    serve_gateway: Any, durable_server: Any, run_id: str
) -> None:
    async with (
        serve_gateway(**redis_keys(durable_server.url, run_id), max_unsent_bytes=100) as served,
        task_run(served, external(served)),
    ):
        agent = await claim(served)
        await agent.chat([user("2+2=")])
        durable_server.kill()
        await agent.act("complete", {"reward": 0.5})
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
        assert status.unsent_bytes > 100
        assert (await served.http.post("/v1/sessions", json={})).status_code == 429
        await asyncio.to_thread(durable_server.start)
        async with asyncio.timeout(patient(15)):
            while (
                await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
            ).unsent_bytes:
                pass
        await opened(served)
    client = redis.asyncio.Redis.from_url(durable_server.url)
    assert (await Ledger(client, run_id).count()).final == 1
    await client.aclose()


async def test_turns_that_extend_each_other_are_one_branch_and_a_changed_history_forks(
    serve_gateway: Any, redis_url: str, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    async with (
        serve_gateway(**redis_keys(redis_url, run_id)) as served,
        task_run(served, external(served)),
    ):
        agent = await claim(served)
        prompt = list(served.codec.encode("2+2="))
        first = await continued(agent, prompt, max_tokens=3)
        longer = [*prompt, *first, 9, 9]
        second = await continued(agent, longer, max_tokens=4)
        await continued(agent, [*prompt, 8], max_tokens=2)
        assert (await agent.export("samples"))[0]["token_ids"] == [*longer, *second]
        await agent.reward(1.0)
        assert (await agent.act("complete"))["state"] == "final"
        branches = [
            decode_trajectory(e.fields, e.payload)
            for e in await appended(redis_client, run_id, "trajectories", 2)
        ]
        trunk, fork = sorted(branches, key=lambda one: one.key.branch_id)
        assert trunk.token_ids == (*longer, *second)
        assert trunk.loss_mask == (0,) * 5 + (1,) * 3 + (0,) * 2 + (1,) * 4
        assert fork.loss_mask == (0,) * 6 + (1,) * 2


async def test_the_number_of_open_sessions_is_bounded_until_silent_sessions_end(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(
        engine={"workers": 1}, sessions={"timeout_s": 0.3, "limit": 1}
    ) as served:
        agent = await opened(served)
        refused = await served.http.post("/v1/sessions", json={})
        assert refused.status_code == 429
        assert "too many sessions" in refused.json()["error"]["message"]
        async with asyncio.timeout(patient(5)):
            while (
                await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
            ).open_sessions:
                pass
        assert (await agent.show())["state"] == "unscored"
