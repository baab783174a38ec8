"""Proxy variables apply to other hosts only, except hosts in `no_proxy`; over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
from ipv6 import LOOPBACK_HOSTS

from paceline.addresses import exempt_loopback
from paceline.client import AsyncClient, Client
from paceline.config import SecurityConfig
from paceline.errors import PacelineError
from paceline.local.patience import patient
from paceline.rpc import Server, channel, wait_healthy
from paceline.services.rollout_gateway.config import RemoteRewardConfig
from paceline.services.rollout_gateway.environments import Episode, EpisodeTask
from paceline.services.rollout_gateway.rewards.remote import RemoteReward

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
EXEMPT = ("no_proxy", "no_grpc_proxy")
OFF = SecurityConfig(token_env="")
MODELS = {"object": "list", "data": [{"id": "m", "object": "model"}]}


class Recorder:
    """An HTTP server, or a proxy: records each first line and answers all with the same JSON."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.port = 0
        self.asked = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            self.lines.append(head.splitlines()[0])
            self.asked.set()
            body = json.dumps({"reward": 0.5, "workers": [], **MODELS}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
            writer.write(
                f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
            )
            await writer.drain()
        writer.close()


@asynccontextmanager
async def recording(host: str = "127.0.0.1") -> AsyncIterator[Recorder]:
    recorder = Recorder()
    server = await asyncio.start_server(recorder.answer, host.strip("[]"), 0)
    recorder.port = server.sockets[0].getsockname()[1]
    async with server:
        yield recorder


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *EXEMPT):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(params=[str.lower, str.upper], ids=["lower", "upper"])
def _dead_proxies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(request.param(name), "http://127.0.0.1:9")


@pytest.mark.usefixtures("_dead_proxies")
@pytest.mark.parametrize("host", [*LOOPBACK_HOSTS, "unix"])
async def test_a_channel_to_this_machine_passes_no_proxy(host: str, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/grpc" if host == "unix" else f"{host}:0"
    server = Server(address, OFF)
    server.add(lambda *_: None, object(), "paceline.test.Nothing")
    port = await server.start()
    try:
        to = address if host == "unix" else f"{host}:{port}"
        await wait_healthy(to, OFF, patient(5))
    finally:
        await server.stop(0)


@pytest.mark.usefixtures("_dead_proxies")
@pytest.mark.parametrize("host", LOOPBACK_HOSTS)
async def test_a_client_of_a_gateway_on_this_machine_passes_no_proxy(host: str) -> None:
    async with recording("127.0.0.1" if host == "localhost" else host) as gateway:
        url = f"http://{host}:{gateway.port}"
        options: Any = {"token": "", "timeout_s": patient(5), "max_retries": 0}
        async with AsyncClient(url, **options) as client:
            assert (await client.openai.models.list()).data[0].id == "m"
        with Client(url, **options) as blocking:
            listed = await asyncio.to_thread(blocking.openai.models.list)
            assert listed.data[0].id == "m"


@pytest.mark.usefixtures("_dead_proxies")
@pytest.mark.parametrize("host", LOOPBACK_HOSTS)
async def test_a_reward_at_a_url_of_this_machine_passes_no_proxy(host: str) -> None:
    async with recording("127.0.0.1" if host == "localhost" else host) as server:
        url = f"http://{host}:{server.port}/score"
        reward = RemoteReward(RemoteRewardConfig(url=url, deadline_s=patient(5)))
        try:
            assert await reward.score(Episode(EpisodeTask("t", "1+1=", "2"), "2", "stop")) == 0.5
        finally:
            await reward.close()


@pytest.mark.few(12)
@pytest.mark.usefixtures("_dead_proxies")
@pytest.mark.parametrize("host", [*LOOPBACK_HOSTS, "127.0.0.2"])
@pytest.mark.parametrize("exempt", ["", "gateway.invalid", "*"])
@pytest.mark.parametrize("ask", [httpx.get, requests.get], ids=["httpx", "requests"])
async def test_a_library_that_reads_the_variables_passes_no_proxy_on_this_machine(
    ask: Callable[..., Any], exempt: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, exempt)
    async with recording("127.0.0.1" if host == "localhost" else host) as server:
        url = f"http://{host}:{server.port}/v1/models"
        exempt_loopback(url, "http://other.invalid:1")
        answer = await asyncio.to_thread(ask, url, timeout=patient(5))
        assert answer.json()["object"] == "list"
    assert os.environ["no_proxy"].startswith(exempt)
    assert "other" not in os.environ["no_proxy"]


async def test_a_channel_to_another_host_goes_to_its_proxy_unless_exempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    insecure = SecurityConfig(token_env="", allow_insecure=True)
    async with recording() as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
        for exempt in ("", "gateway.invalid"):
            monkeypatch.setenv("no_proxy", exempt)
            async with channel("gateway.invalid:7401", insecure) as to:
                to.get_state(try_to_connect=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(to.channel_ready(), 0.5)
    assert set(proxy.lines) == {"CONNECT gateway.invalid:7401 HTTP/1.1"}


@pytest.mark.slow
async def test_a_client_of_a_gateway_on_another_host_goes_to_its_proxy_unless_exempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with recording() as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        url: str = "http://gateway.invalid:7408"
        options: Any = {"token": "", "max_retries": 0}
        async with AsyncClient(url, timeout_s=patient(5), **options) as client:
            assert (await client.openai.models.list()).data[0].id == "m"
        async with AsyncClient(url, timeout_s=0.5, trust_env=False, **options) as direct:
            with pytest.raises(PacelineError):
                await direct.session()
        monkeypatch.setenv("no_proxy", "gateway.invalid")
        async with AsyncClient(url, timeout_s=0.5, **options) as exempt:
            with pytest.raises(PacelineError):
                await exempt.session()
    assert proxy.lines == ["GET http://gateway.invalid:7408/v1/models HTTP/1.1"]
