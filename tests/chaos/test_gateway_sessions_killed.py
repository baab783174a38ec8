"""A gateway is killed with -9 and restarted: agents learn the outcome of their sessions, and no
final result is lost.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.gateway.http_agent import SLOW, Agent, user
from watched_stream import ledger_record

from examples.scripted_engine.engine import SCRIPTED_PATH
from paceline.config import SecurityConfig
from paceline.local.patience import patient
from paceline.local.ports import free_ports
from paceline.rpc import channel, leased, wait_healthy
from paceline.streams import Ledger, RedisStream, connect, decode_trajectory, run_key
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub

pytestmark = pytest.mark.chaos

TOKENIZER = Path(__file__).parents[2] / "examples" / "demo" / "policy_start"
TOKEN = "the-gateways-token"
START_S = patient(60)


class Gateway:
    """The gateway's process, with the same ports after each restart."""

    def __init__(self, directory: Path, redis_url: str, run_id: str) -> None:
        grpc_port, http_port = free_ports(2)
        self.address, self._url = f"127.0.0.1:{grpc_port}", f"http://127.0.0.1:{http_port}"
        self.http = httpx.AsyncClient(
            base_url=self._url, timeout=patient(20), headers={"authorization": f"Bearer {TOKEN}"}
        )
        keys = {
            "run.id": run_id,
            "run.dir": directory / "run",
            "redis.durable_url": redis_url,
            "addresses.gateway": self.address,
            "addresses.http": f"127.0.0.1:{http_port}",
            "model": model(directory),
            "trajectories": "true",
            "engine.kind": SCRIPTED_PATH,
            "engine.workers": 1,
            "engine.options.file": directory / "script.json",
        }
        self._words = [f"{key}={value}" for key, value in keys.items()]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns when the gateway serves."""
        words = (sys.executable, "-m", "paceline.services.rollout_gateway", *self._words)
        self._process = await asyncio.create_subprocess_exec(*words, env=os.environ.copy())
        await wait_healthy(self.address, SecurityConfig(), START_S)

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None

    async def opened(self, **body: Any) -> Agent:
        response = await self.http.post("/v1/sessions", json=body)
        assert response.status_code == 201, response.text
        return Agent(self.http, response.json())


def model(directory: Path) -> Path:
    """A model directory with the files that the scripted engine reads, and a slow script."""
    path = directory / "tiny-model"
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, path)
    config = {"model_type": "llama", "hidden_size": 8, "vocab_size": 320, "eos_token_id": 1}
    (path / "config.json").write_text(json.dumps(config))
    (directory / "script.json").write_text(json.dumps(SLOW))
    return path


@pytest.fixture
async def gateway(
    tmp_path: Path, redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Gateway]:
    monkeypatch.setenv("PACELINE_TOKEN", TOKEN)
    served = Gateway(tmp_path, redis_url, run_id)
    await served.start()
    try:
        yield served
    finally:
        await served.kill()
        await served.http.aclose()


async def until_broken(agent: Agent, begun: asyncio.Event) -> None:
    """Reads a stream until its server is gone."""
    body = {"messages": [user("2+2=")], "max_tokens": 450, "ignore_eos": True, "stream": True}
    async with agent.http.stream(
        "POST", "/v1/chat/completions", headers=agent.headers, json=body
    ) as response:
        async for _ in response.aiter_lines():
            begun.set()


async def step_of(gateway: Gateway, run_id: str, groups: int) -> list[Any]:
    request = rpb.RunTasksRequest(
        context=leased(SecurityConfig(), run_id, 3, 1),
        purpose=tpb.PURPOSE_TRAIN,
        reward="agent",
        environment="external",
        open_groups=groups,
    )
    async with channel(gateway.address, SecurityConfig()) as peer:
        return [
            event async for event in RolloutServiceStub(peer).RunTasks(request, timeout=patient(20))
        ]


@pytest.mark.slow
async def test_sessions_of_a_killed_gateway_are_told_failed_and_what_was_final_stays(
    gateway: Gateway, redis_url: str, run_id: str
) -> None:
    client = connect(redis_url)
    ledger = Ledger(client, run_id)
    done = await gateway.opened(group_id="done")
    await done.chat([user("2+2=")], max_tokens=4)
    assert (await done.act("complete", {"reward": 1.0}))["state"] == "final"
    before = await step_of(gateway, run_id, 1)
    between, streaming = (
        await gateway.opened(group_id="g1", task_id="t1"),
        await gateway.opened(group_id="g2"),
    )
    held, untrained = await gateway.opened(group_id="g3"), await gateway.opened(trainable=False)
    for agent in (between, held, untrained):
        await agent.chat([user("2+2=")], max_tokens=4)
    await held.act("complete", {"reward": 1.0})  # no step has taken it
    begun = asyncio.Event()
    stream = asyncio.create_task(until_broken(streaming, begun))
    await asyncio.wait_for(begun.wait(), patient(10))
    await gateway.kill()
    with pytest.raises(httpx.TransportError):
        await stream
    await gateway.start()
    for agent in (between, streaming, held):
        told = (await agent.chat([user("2+2=")], status=409))["error"]
        assert told["code"] == "session_ended"
        assert "failed" in told["message"]
        assert "infra" in told["message"]
        for url, headers in (
            (f"/v1/sessions/{agent.id}", {}),
            ("/v1/sessions/current", agent.headers),
        ):
            shown = (await gateway.http.get(url, headers=headers)).json()
            assert (shown["id"], shown["state"], shown["fail_reason"]) == (
                agent.id,
                "failed",
                "infra",
            )
        note = await ledger_record(ledger, f"{agent.id}/0")
        assert note is not None
        assert (note["final"], note["reason"], note["group_id"]) == (
            False,
            "failed:infra",
            agent.session["group_id"],
        )
    assert (await ledger_record(ledger, f"{untrained.id}/0")) is None
    await untrained.chat([user("x")], status=401)
    after = await step_of(gateway, run_id, 1)
    assert [group.group_id for group in after[-1].finished.closed_groups] == ["done"]
    assert after[-1].finished.closed_groups == before[-1].finished.closed_groups
    count = await ledger.count()
    assert (count.final, count.open, count.lost) == (1, 1, 0)
    again = await gateway.opened(group_id="g1")
    await again.chat([user("2+2=")], max_tokens=4)
    await again.act("complete", {"reward": 0.5})
    await gateway.kill()
    await gateway.start()
    told = (await between.chat([user("x")], status=409))["error"]["message"]
    assert "failed: infra" in told  # also after a second restart
    stream_of = RedisStream(client, run_key(run_id, "trajectories"))
    await stream_of.create_group("test")
    (entry,) = await stream_of.read("test", "c", 5, 1.0)
    assert decode_trajectory(entry.fields, entry.payload).key.session_id == done.id
    await client.aclose()


async def test_a_claimed_task_is_offered_again_by_the_next_gateway(
    gateway: Gateway, redis_url: str, run_id: str
) -> None:
    request = rpb.RunTasksRequest(
        context=leased(SecurityConfig(), run_id, 1, 1),
        purpose=tpb.PURPOSE_TRAIN,
        tasks=[rpb.TaskSpec(task_id="a", prompt="1+1=", group_id="g")],
        samples_per_task=2,
        sampling=tpb.SamplingParams(temperature=1.0, max_tokens=8),
        environment="external",
        reward="agent",
    )
    claim = {"claim": True, "wait_s": 10}
    async with channel(gateway.address, SecurityConfig()) as peer:
        call = RolloutServiceStub(peer).RunTasks(request, timeout=patient(60))
        first, second = await gateway.opened(**claim), await gateway.opened(**claim)
        for agent in (first, second):
            await agent.chat([user("1+1=")], max_tokens=4)
        await first.act("complete", {"reward": 1.0})
        assert (await anext(aiter(call))).WhichOneof("event") == "sample"
        client = connect(redis_url)
        async with asyncio.timeout(patient(10)):
            while not (await Ledger(client, run_id).count()).final:
                pass
        await gateway.kill()
        await asyncio.gather(call.code(), return_exceptions=True)
    await gateway.start()
    async with channel(gateway.address, SecurityConfig()) as peer:
        told: list[Any] = []
        call = RolloutServiceStub(peer).RunTasks(request, timeout=patient(60))
        repeated = await gateway.opened(**claim)
        assert repeated.id == second.id
        assert "failed: infra" in (await second.chat([user("x")], status=409))["error"]["message"]
        await repeated.chat([user("1+1=")], max_tokens=4)
        await repeated.act("complete", {"reward": 0.5})
        told = [event async for event in call]
    samples = {
        event.sample.session_id: event.sample.reward.value
        for event in told
        if event.HasField("sample")
    }
    assert samples == {first.id: 1.0, second.id: 0.5}
    async with asyncio.timeout(patient(10)):
        while (await Ledger(client, run_id).count()).final != 2:
            pass
    record = await ledger_record(Ledger(client, run_id), f"{second.id}/0")
    assert record is not None
    assert (record["final"], record["reward"]) == (True, 0.5)
    await client.aclose()
