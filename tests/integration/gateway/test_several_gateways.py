"""Two gateways of one run on one host, with workers of the scripted engine."""

from __future__ import annotations

import asyncio
import os
import shutil
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
from integration.gateway.commands import commit, lease, push, worker_versions
from integration.gateway.conftest import NO_AUTHORITIES, Served, ServeGateway
from integration.gateway.http_agent import opened, task_run, user
from integration.gateway.test_open_traffic import closed_of, finished, redis_keys, step_request

from paceline.client import AsyncClient
from paceline.errors import ConfigError, FailedPrecondition, WeightsError
from paceline.local.patience import patient
from paceline.local.ports import free_port, free_ports
from paceline.rpc import rpc_errors
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb
from paceline.weights import commit_versions

CONFIG = Path(__file__).parents[3] / "examples" / "load_balancer" / "haproxy.cfg"
HAPROXY = os.environ.get("HAPROXY") or shutil.which("haproxy")
Pair = Callable[..., AbstractAsyncContextManager[tuple[Served, Served]]]


@pytest.fixture
def pair(serve_gateway: ServeGateway) -> Pair:
    """`async with pair(**config keys) as (first, second)`."""

    @asynccontextmanager
    async def serve(**keys: Any) -> AsyncIterator[tuple[Served, Served]]:
        grpc, http, more_grpc, more_http = (f"127.0.0.1:{port}" for port in free_ports(4))
        addresses = {
            "gateway": grpc,
            "http": http,
            "more_gateways": [more_grpc],
            "more_gateways_http": [more_http],
        }
        async with AsyncExitStack() as stack:
            second, first = [
                await stack.enter_async_context(
                    serve_gateway(number=number, addresses=addresses, **keys)
                )
                for number in (1, 0)
            ]
            yield first, second

    return serve


def group_of(number: int, start: str = "g") -> str:
    """A chosen group name that belongs to a gateway of two."""
    names = (f"{start}{index}" for index in range(100))
    return next(name for name in names if zlib.crc32(name.encode()) % 2 == number)


async def test_names_of_another_gateway_are_refused_with_its_address(pair: Pair) -> None:
    async with pair() as (first, second):
        agent = await opened(second)
        answer = await agent.chat([user("1+1=")])
        assert agent.session["api_key"].startswith("sk-pl-1-")
        assert (agent.id[:2], answer["id"][:11]) == ("1-", "chatcmpl-1-")
        assert not (await opened(first)).id.startswith("1-")
        asked = {"model": "m", "messages": [user("1+1=")]}
        for response in (
            await first.http.post("/v1/chat/completions", json=asked, headers=agent.headers),
            await first.http.get(f"/v1/sessions/{agent.id}"),
            await first.http.post("/v1/rewards", json={"completion_id": answer["id"], "value": 1}),
            await first.http.post("/v1/sessions", json={"group_id": group_of(1)}),
        ):
            assert response.status_code == 421, response.text
            assert response.headers["x-paceline-gateway"] == "1"
            error = response.json()["error"]
            assert error["code"] == "other_gateway"
            assert second.http.base_url.netloc.decode() in error["message"]
        request = rpb.GenerateRequest(session_id=agent.id, text="1+1=")
        address = second.config.addresses.gateway
        with pytest.raises(FailedPrecondition, match=address) as refused, rpc_errors():
            await first.stub.Generate(request, timeout=patient(5)).read()
        assert refused.value.reason == "OTHER_GATEWAY"
        unknown = await first.http.get("/v1/sessions/7-0123456789abcdef0123456789abcdef")
        assert unknown.status_code == 404
        assert (await agent.show())["state"] == "open"


async def test_an_invented_key_does_not_buy_the_address_of_a_gateway(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair() as (first, second):
        monkeypatch.setenv("PACELINE_TOKEN", "a-token-of-the-operators")
        asked = {"model": "m", "messages": [user("1+1=")]}
        headers = {"authorization": f"Bearer sk-pl-1-{'0' * 48}"}
        answer = await first.http.post("/v1/chat/completions", json=asked, headers=headers)
        assert (answer.status_code, answer.headers["x-paceline-gateway"]) == (421, "1")
        addresses = second.config.addresses
        assert not {one for one in (addresses.http, addresses.gateway) if one in answer.text}


async def test_a_version_reaches_both_gateways_and_one_of_them_need_not_judge_it(
    pair: Pair, script: dict[str, Any]
) -> None:
    script["nan_policies"] = [2]
    async with pair() as both:
        first, second = both
        await push(first, pb.WEIGHT_TARGET_POLICY, 1)
        for served in both:
            await commit(served, VersionSet(1, 1, 0))
            assert await worker_versions(served) == [(1, 0)]
        assert (Path(second.config.spool_dir) / "gateway-1" / "policy-1").is_dir()
        await push(first, pb.WEIGHT_TARGET_POLICY, 2)
        bad, context = VersionSet(2, 2, 0), lease(first)
        with pytest.raises(WeightsError, match="finite log-probs"):
            await commit_versions(first.channel, context, bad, judge=True)
        await commit_versions(second.channel, context, bad, judge=False)
        assert await worker_versions(second) == [(2, 0)]


async def test_assigned_groups_belong_to_their_gateway_also_after_a_restart(
    pair: Pair, redis_url: str, redis_client: redis.asyncio.Redis, run_id: str
) -> None:
    keys = redis_keys(redis_url, run_id)
    async with pair(**keys) as both:
        for number, served in enumerate(both):
            for start in "ab":
                await finished(served, group_of(number, start), 1, [1.0])
            watch = served.stub.WatchGroups(rpb.WatchGroupsRequest(), timeout=patient(10))
            assert (await watch.read()).closed == 2
            watch.cancel()
            step = step_request(served, 4, groups=3)
            step.assigned = True
            async with task_run(served, step) as told:
                order = rpb.AssignGroupsRequest(context=step.context, most=2 - number)
                answer = await served.stub.AssignGroups(order, timeout=patient(5))
                assert answer.assigned == 2 - number
                order = rpb.AssignGroupsRequest(context=step.context, last=True)
                await served.stub.AssignGroups(order, timeout=patient(5))
            wanted = [group_of(number, start) for start in "ab"[: 2 - number]]
            assert [name for name, _ in closed_of(told)] == wanted
    async with pair(**keys) as both:
        for number, served in enumerate(both):
            step = step_request(served, 4)
            order = rpb.AssignGroupsRequest(context=step.context, last=True)
            answer = await served.stub.AssignGroups(order, timeout=patient(5))
            assert answer.assigned == 2 - number


def test_a_gateway_has_its_own_addresses_and_directories(tmp_path: Path) -> None:
    addresses = {"more_gateways": ["b:1"], "more_gateways_http": ["b:2"]}
    config = GatewayConfig.model_validate(
        {"addresses": addresses, "trajectories": True, "run": {"dir": str(tmp_path)}}
    )
    own = config.of_gateway(1)
    assert (own.addresses.gateway, own.addresses.http, own.name) == ("b:1", "b:2", "gateway-1")
    assert own.spool == tmp_path / "spool" / "gateway-1"
    assert config.of_gateway(0).spool == tmp_path / "spool" / "gateway"
    assert own.all_addresses.gateways == config.addresses.gateways
    with pytest.raises(ConfigError, match=r"seen: 2; allowed: 0\.\.1"):
        config.of_gateway(2)


@asynccontextmanager
async def balancer(both: tuple[Served, Served]) -> AsyncIterator[str]:
    """HAProxy with the example's configuration; yields its URL."""
    listen = f"127.0.0.1:{free_port()}"
    gateways = {
        f"GATEWAY_{number}": served.http.base_url.netloc.decode()
        for number, served in enumerate(both)
    }
    process = await asyncio.create_subprocess_exec(
        str(HAPROXY), "-db", "-f", str(CONFIG), env={**os.environ, **gateways, "LISTEN": listen}
    )
    try:
        async with (
            asyncio.timeout(patient(20)),
            httpx.AsyncClient(verify=NO_AUTHORITIES) as http,
        ):
            while True:
                try:
                    await http.get(f"http://{listen}/health")
                    break
                except httpx.TransportError:
                    assert process.returncode is None
        yield f"http://{listen}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.skipif(HAPROXY is None, reason="no haproxy in $HAPROXY or on the path")
async def test_a_load_balancer_routes_sessions_by_their_keys(pair: Pair) -> None:
    async with pair() as both, balancer(both) as url:
        opened_by: set[bool] = set()
        async with AsyncClient(url) as client:
            for index in range(8):
                session = await client.session(group=f"g{index}")
                opened_by.add(session.id.startswith("1-"))
                await session.chat([user("1+1=")])
                await session.complete(reward=1.0)
        assert opened_by == {True, False}
        async with httpx.AsyncClient(base_url=url, verify=NO_AUTHORITIES) as http:
            for served in both:
                agent = await opened(served)
                key = {"x-api-key": agent.session["api_key"]}
                for _ in range(3):
                    shown = await http.get("/v1/sessions/current", headers=key)
                    assert shown.json()["id"] == agent.id
