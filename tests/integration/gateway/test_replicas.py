"""Several replicas behind one address are one gateway: real processes of the scripted engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis.asyncio
from integration.gateway.commands import (
    commit,
    push,
    release,
    resume,
    until_serving,
    worker_versions,
    workers,
)
from integration.gateway.conftest import Served, ServeGateway
from integration.gateway.http_agent import SLOW, claimed, opened, task_run, user
from integration.gateway.test_open_traffic import closed_of, finished, samples_of, step_request

from paceline import telemetry
from paceline.config import TelemetryConfig
from paceline.errors import ConfigError, InvalidInput, StaleEpoch, WeightsError
from paceline.local.patience import patient
from paceline.local.processes import usable_cores
from paceline.rpc.progress import ask_progress
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.place import places
from paceline.services.rollout_gateway.sessions.shard import shard_of
from paceline.streams import Ledger
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb


def keys(model_dir: Path, **more: Any) -> dict[str, Any]:
    """Settings of two replicas of a worker each."""
    run = {"id": "replicas", "dir": str(model_dir.parent / "run")}
    return {"replicas": 2, "engine": {"workers": 2}, "run": run, **more}


@pytest.fixture
def twins(serve_gateway: ServeGateway, model_dir: Path) -> Any:
    @asynccontextmanager
    async def serve(**more: Any) -> AsyncIterator[Served]:
        async with serve_gateway(**keys(model_dir, **more)) as served:
            yield served

    return serve


async def run_tasks(served: Served, **options: Any) -> dict[str, list[Any]]:
    """News of a call by their names."""
    news: dict[str, list[Any]] = {"sample": [], "share": [], "closed": [], "finished": []}
    request = served.tasks_request(**options)
    async for response in served.stub.RunTasks(request, timeout=patient(30)):
        name = response.WhichOneof("event")
        news[name].append(getattr(response, name))
    return news


def copies(served: Served, name: str) -> int:
    """Directories of a version below the spool."""
    return len([*Path(served.config.spool_dir).rglob(name)])


async def test_tasks_are_spread_over_all_replicas_and_told_of_in_one_stream(twins: Any) -> None:
    async with twins() as served:
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(10))
        assert [one.worker_index for one in status.workers] == [0, 1]
        assert all(one.ready for one in status.workers)
        assert len({one.pid for one in status.workers}) == 2
        news = await run_tasks(served)
        assert {(one.task_id, one.worker_index) for one in news["sample"]} == {("a", 0), ("b", 1)}
        assert sorted(one.worker_index for one in news["share"]) == [0, 1]
        assert {one.group_id for one in news["closed"]} == {"g-a", "g-b"}
        (finished,) = news["finished"]
        assert finished.scored == 4
        assert [one.group_id for one in finished.closed_groups] == ["g-a", "g-b"]


async def test_sessions_live_where_their_names_say_and_are_reached_by_any_of_them(
    twins: Any,
) -> None:
    async with twins() as served:
        homes = Counter[int]()
        for _ in range(8):
            agent = await opened(served)
            home = shard_of(agent.session["api_key"], 2)
            homes[home] += 1
            assert shard_of(agent.id, 2) == home
            said = await served.http.post(
                "/v1/completions",
                json={"prompt": "1+1=", "max_tokens": 8},
                headers=agent.headers,
            )
            assert shard_of(said.json()["id"], 2) == home
            assert (await agent.show())["turns"] == 1
            by_id = await served.http.get(f"/v1/sessions/{agent.id}")
            assert by_id.json()["turns"] == 1
            grant = {"completion_id": said.json()["id"], "value": 1.0}
            assert (await served.http.post("/v1/rewards", json=grant)).status_code == 200
            assert (await agent.act("complete"))["state"] == "final"
        assert homes == {0: 4, 1: 4}, "those without a group take turns"


async def test_siblings_of_a_group_are_at_one_replica(twins: Any) -> None:
    async with twins() as served:
        for group in ("g1", "g2", "g3"):
            agents = [await opened(served, group_id=group, group_size=3) for _ in range(3)]
            assert {shard_of(agent.id, 2) for agent in agents} == {shard_of(group, 2)}


async def test_a_session_over_grpc_is_the_same_over_http(twins: Any) -> None:
    async with twins() as served:
        stub, limit = served.stub, patient(20)
        session = await stub.OpenSession(rpb.OpenSessionRequest(trainable=True), timeout=limit)
        asked = rpb.GenerateRequest(session_id=session.session_id, text="1+1=")
        asked.sampling.max_tokens = 8
        asked.sampling.temperature = 1.0
        pieces = [piece async for piece in stub.Generate(asked, timeout=limit)]
        reward = rpb.PostRewardRequest(completion_id=pieces[-1].completion_id)
        reward.reward.value = 1.0
        await stub.PostReward(reward, timeout=limit)
        shown = await served.http.get(f"/v1/sessions/{session.session_id}")
        assert shown.json()["turns"] == 1
        close = rpb.CloseSessionRequest(session_id=session.session_id)
        assert (await stub.CloseSession(close, timeout=limit)).state == rpb.SESSION_STATE_FINAL
        with pytest.raises(grpc.aio.AioRpcError, match="no such session"):
            await stub.GetSession(rpb.GetSessionRequest(session_id="0-a-0"), timeout=limit)


async def test_a_conversation_without_a_key_goes_on_where_it_began(
    conversations: ServeGateway, model_dir: Path
) -> None:
    async with conversations(**keys(model_dir)) as served:
        for question in ("Hi there", "Who are you", "Where", "count"):
            messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
            for turn in range(3):
                answer = await served.http.post(
                    "/v1/chat/completions", json={"messages": messages, "max_tokens": 40}
                )
                assert answer.status_code == 200, answer.text
                message = answer.json()["choices"][0]["message"]
                messages += [message, {"role": "user", "content": "sure?"}]
                known = await served.http.get("/health")
                assert known.json()["workers"] == 2, turn
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(10))
        assert status.open_sessions == 4, "a conversation is one session, wherever it is"


async def test_a_streamed_answer_passes_through_as_events_and_ends_when_the_client_goes(
    twins: Any, script: dict[str, Any]
) -> None:
    script |= SLOW
    async with twins() as served:
        body = {"prompt": "2+2=", "max_tokens": 400, "stream": True, "ignore_eos": True}
        async with served.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            assert sum([one.health.running for one in await workers(served)]) == 1
        async with asyncio.timeout(patient(10)):
            while any(one.health.running for one in await workers(served)):
                pass


async def test_what_is_wrong_is_answered_in_the_apis_own_words(twins: Any) -> None:
    async with twins() as served:
        for method, path, body, status in (
            ("GET", "/nowhere", None, 404),
            ("GET", f"/v1/sessions/{'0' * 32}", None, 404),
            ("GET", "/v1/sessions/1-a-0", None, 404),
            ("POST", "/v1/completions", {"prompt": 3.5}, 400),
            ("POST", "/v1/sessions", {"claim": True}, 409),
        ):
            answer = await served.http.request(method, path, json=body)
            assert (answer.status_code, "error" in answer.json()) == (status, True), answer.text
        key = {"authorization": "Bearer sk-pl-unknown"}
        assert (await served.http.get("/v1/models", headers=key)).status_code == 401


async def test_agents_claim_the_tasks_of_all_replicas(twins: Any) -> None:
    async with twins() as served:
        request = served.tasks_request(environment="external", reward="agent", samples_per_task=2)
        async with task_run(served, request) as told:
            for _ in range(4):
                agent = await claimed(served, claim=True, wait_s=20)
                assert agent is not None
                await agent.chat([user(agent.session["task"]["prompt"])])
                await agent.act("complete", {"reward": 1.0})
        samples = {
            (one.sample.task_id, one.sample.sample_index) for one in told if one.sample.task_id
        }
        assert samples == {("a", 0), ("a", 1), ("b", 0), ("b", 1)}


async def test_metrics_of_all_replicas_stand_on_one_page(twins: Any) -> None:
    telemetry.setup("gateway", TelemetryConfig())
    async with twins() as served:
        await run_tasks(served)
        page = (await served.http.get("/metrics")).text
        tokens = [line for line in page.splitlines() if line.startswith("paceline_gateway_tokens_")]
        assert any('replica="0"' in line for line in tokens), page[:2000]
        assert any('replica="1"' in line for line in tokens)
        answer = await served.http.get("/v1/models")
        assert len(answer.headers.get_list("date")) == len(answer.headers.get_list("server")) == 1
        described = [line for line in page.splitlines() if line.startswith("# TYPE ")]
        assert len(described) == len(set(described))
    telemetry.shutdown()


async def test_workers_are_lent_and_taken_back_by_their_number_in_the_run(twins: Any) -> None:
    async with twins() as served:
        assert set(await release(served, 3, 1)) == {1}
        assert set(await release(served, 4, 0, 1)) == {0, 1}
        with pytest.raises(StaleEpoch):
            await release(served, 3, 0)
        with pytest.raises(InvalidInput, match=r"no such worker; seen: 2; allowed: 0\.\.1"):
            await release(served, 5, 2)
        assert await resume(served, 6) == ([0, 1], 0)
        parts = (await ask_progress(served.channel, patient(5))).parts
        assert [part.name for part in parts] == ["gateway", "worker 0", "worker 1"]


async def test_versions_come_once_and_serve_on_all_replicas(twins: Any) -> None:
    async with twins() as served:
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        await push(served, pb.WEIGHT_TARGET_DRAFTER, 1)
        assert await worker_versions(served) == [(0, 0), (0, 0)]
        await commit(served, VersionSet(1, 1, 1))
        assert await worker_versions(served) == [(1, 1), (1, 1)]
        assert copies(served, "policy-1") == 1
        with pytest.raises(WeightsError, match="not prepared"):
            await commit(served, VersionSet(2, 7, 1))


async def test_a_set_that_one_replica_refuses_serves_on_none(
    twins: Any, script: dict[str, Any]
) -> None:
    script["nan_policies"] = [1]
    async with twins() as served:
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        with pytest.raises(WeightsError, match="finite log-probs"):
            await commit(served, VersionSet(1, 1, 0))
        await until_serving(served, [(0, 0), (0, 0)])
        await push(served, pb.WEIGHT_TARGET_POLICY, 2)
        await commit(served, VersionSet(2, 2, 0))
        assert await worker_versions(served) == [(2, 0), (2, 0)]


async def test_a_replica_that_was_killed_comes_back_with_what_serves_and_the_other_goes_on(
    twins: Any,
) -> None:
    async with twins() as served:
        await push(served, pb.WEIGHT_TARGET_POLICY, 1)
        await served.stub.SetArm(rpb.SetArmRequest(arm="off"), timeout=patient(10))
        agents = {shard_of(agent.id, 2): agent for agent in [await opened(served) for _ in "ab"]}
        os.kill(served.fleet.pids["gateway-1"], signal.SIGKILL)
        async with asyncio.timeout(patient(10)):
            while served.fleet.replicas[1].up.is_set():
                await served.http.get("/health")
        assert (await agents[0].show())["state"] == "open"
        lost = await served.http.get("/v1/sessions/current", headers=agents[1].headers)
        assert (lost.status_code, lost.headers["retry-after"]) == (503, "1")
        await commit(served, VersionSet(1, 1, 0))
        assert await worker_versions(served) == [(1, 0)]
        async with asyncio.timeout(patient(60)):
            await served.fleet.replicas[1].up.wait()
        assert await worker_versions(served) == [(1, 0), (1, 0)]
        (totals,) = (await run_tasks(served))["finished"]
        assert totals.scored == 4
        assert {arm.arm for arm in totals.arms if arm.pulls} == {"off"}, "as it was forced"


@pytest.mark.parametrize(("replicas", "workers"), [(3, 2), (2, 1)])
def test_more_replicas_than_workers_are_refused_by_name(
    replicas: int, workers: int, tmp_path: Path
) -> None:
    config = GatewayConfig.model_validate({"replicas": replicas, "engine": {"workers": workers}})
    with pytest.raises(ConfigError, match=rf"gateway\.replicas.*{replicas} replicas, {workers} w"):
        places(config, tmp_path, tmp_path)


async def test_more_replicas_than_cores_are_refused_by_name_before_anything_starts(
    model_dir: Path, serve_gateway: ServeGateway
) -> None:
    many = usable_cores() + 1
    named = rf"gateway\.replicas.*{many} replicas, {many - 1} usable cores"
    with pytest.raises(ConfigError, match=named):
        async with serve_gateway(**keys(model_dir, replicas=many, engine={"workers": many})):
            pass


def test_every_worker_is_in_one_replica_and_none_has_many_more(tmp_path: Path) -> None:
    for replicas, count in ((1, 1), (2, 5), (3, 8), (8, 8)):
        config = GatewayConfig.model_validate({"replicas": replicas, "engine": {"workers": count}})
        found = places(config, tmp_path, tmp_path)
        held = [one.shard.index for worker in range(count) for one in found if one.holds(worker)]
        assert held == sorted(held)
        counts = Counter(held)
        assert (len(counts), len(held)) == (replicas, count)
        assert max(counts.values()) - min(counts.values()) <= 1


async def test_steps_of_open_traffic_take_exactly_the_groups_that_closed_wherever_that_was(
    twins: Any, redis_url: str, redis_client: redis.asyncio.Redis, run_id: str, model_dir: Path
) -> None:
    run = {"id": run_id, "dir": str(model_dir.parent / "run")}
    redis_keys = {"trajectories": True, "redis": {"durable_url": redis_url}, "run": run}
    names = [f"g{number}" for number in range(7)]
    assert {shard_of(name, 2) for name in names} == {0, 1}
    async with twins(**redis_keys) as served:
        async with task_run(served, step_request(served, 4, groups=5)) as first:
            for name in names:
                await finished(served, name, 1, [1.0])
        assert len({name for name, _ in closed_of(first)}) == 5
        assert len(samples_of(first)) == 5
        async with task_run(served, step_request(served, 4, groups=5)) as again:
            pass
        assert sorted(closed_of(again)) == sorted(closed_of(first))
        async with task_run(served, step_request(served, 5, groups=2)) as second:
            pass
        assert {name for name, _ in [*closed_of(first), *closed_of(second)]} == set(names)
        assert (await Ledger(redis_client, run_id).count()).final == 7
    async with (
        twins(**redis_keys) as served,
        task_run(served, step_request(served, 4, groups=5)) as after,
    ):
        pass
    assert sorted(closed_of(after)) == sorted(closed_of(first))


async def test_what_a_killed_replica_had_open_is_lost_and_told_of_and_nothing_of_the_other(
    twins: Any, redis_url: str, redis_client: redis.asyncio.Redis, run_id: str, model_dir: Path
) -> None:
    run = {"id": run_id, "dir": str(model_dir.parent / "run")}
    redis_keys = {"trajectories": True, "redis": {"durable_url": redis_url}, "run": run}
    async with twins(**redis_keys) as served:
        agents = {shard_of(agent.id, 2): agent for agent in [await opened(served) for _ in "ab"]}
        replica = served.fleet.replicas[1]
        os.kill(served.fleet.pids["gateway-1"], signal.SIGKILL)
        async with asyncio.timeout(patient(60)):
            while replica.up.is_set():
                await served.http.get("/health")
            await replica.up.wait()
        assert (await agents[0].show())["state"] == "open"
        lost = (await served.http.get(f"/v1/sessions/{agents[1].id}")).json()
        assert (lost["state"], lost["fail_reason"]) == ("failed", "infra")
        refused = await agents[1].chat([user("2+2=")], status=409)
        assert "infra" in refused["error"]["message"]
        await agents[0].chat([user("2+2=")])
        assert (await Ledger(redis_client, run_id).count()).final == 0
