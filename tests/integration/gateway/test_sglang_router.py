"""A gateway in the list of an SGLang router: entered while it serves, entered again where the router
forgot, and gone when it stops.

SGLang's own router takes part where it is installed: $SGLANG_ROUTER_PYTHON names the Python that
has `sglang-router`, since that package brings a web server of its own.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from integration.gateway.conftest import EOS, NO_AUTHORITIES, ServeGateway, serving, tiny_model
from integration.gateway.conversations import teach
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from paceline.errors import ConfigError
from paceline.local.patience import patient
from paceline.local.ports import free_port, free_ports
from paceline.services.rollout_gateway.api import sglang_router
from paceline.services.rollout_gateway.chat.text import TextCodec

PYTHON = os.environ.get("SGLANG_ROUTER_PYTHON", sys.executable)
KEY = "router-key"


class WorkerList:
    """The part of the router's API that keeps its list, as SGLang's router 0.3.2 answers it."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self.changed = asyncio.Event()
        self.asked = asyncio.Event()
        self.nonsense = False  # it answers as another server would
        self.keys: set[str | None] = set()
        self.app = Starlette(
            routes=[
                Route("/workers", self.show, methods=["GET"]),
                Route("/workers", self.add, methods=["POST"]),
                Route("/workers/{id}", self.remove, methods=["DELETE"]),
            ]
        )

    async def show(self, request: Request) -> JSONResponse:
        if self.nonsense:
            self.asked.set()
            return JSONResponse(["another server"])
        return JSONResponse({"workers": list(self.entries.values())})

    async def add(self, request: Request) -> JSONResponse:
        self.keys.add(request.headers.get("authorization"))
        body = await request.json()
        name = str(len(self.entries) + 1)
        self.entries[name] = {"id": name, **body}
        self.changed.set()
        return JSONResponse({"status": "accepted", "worker_id": name}, status_code=202)

    async def remove(self, request: Request) -> JSONResponse:
        self.entries.pop(request.path_params["id"])
        return JSONResponse({}, status_code=202)

    async def wait(self) -> None:
        """Until somebody has entered since the last time."""
        await asyncio.wait_for(self.changed.wait(), patient(20))
        self.changed.clear()


@asynccontextmanager
async def listing(port: int) -> AsyncIterator[WorkerList]:
    """The list on a port."""
    kept = WorkerList()
    server = uvicorn.Server(uvicorn.Config(kept.app, port=port, log_config=None, lifespan="off"))
    task = asyncio.create_task(server.serve())
    try:
        yield kept
    finally:
        server.should_exit = True
        await task


async def test_a_gateway_stands_in_the_routers_list_while_it_serves(
    serve_gateway: ServeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_router, "LOOK_S", 0.05)
    monkeypatch.setenv("PACELINE_ROUTER_KEY", KEY)
    port = free_port()
    engine = {"sglang": {"router": f"http://127.0.0.1:{port}/"}}
    # the gateway is there before the router
    async with serve_gateway(engine=engine) as served, listing(port) as kept:
        await kept.wait()
        (entry,) = kept.entries.values()
        assert entry["url"] == str(served.http.base_url).rstrip("/")
        assert entry["model_id"] == "tiny-model"
        assert "api_key" not in entry  # it would open the gateway to every caller
        kept.entries.clear()
        await kept.wait()
        assert [one["url"] for one in kept.entries.values()] == [entry["url"]]
        assert kept.keys == {f"Bearer {KEY}"}


async def test_a_gateway_that_stops_leaves_the_list(serve_gateway: ServeGateway) -> None:
    port = free_port()
    async with listing(port) as kept:
        async with serve_gateway(engine={"sglang": {"router": f"http://127.0.0.1:{port}"}}):
            await kept.wait()
        assert kept.entries == {}


async def test_a_server_that_is_no_router_is_asked_again(
    serve_gateway: ServeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_router, "LOOK_S", 0.05)
    port = free_port()
    async with listing(port) as kept:
        kept.nonsense = True
        async with serve_gateway(engine={"sglang": {"router": f"http://127.0.0.1:{port}"}}):
            await asyncio.wait_for(kept.asked.wait(), patient(20))
            kept.nonsense = False
            await kept.wait()
            kept.nonsense = True  # also when it leaves


async def test_an_address_that_names_no_host_is_refused(serve_gateway: ServeGateway) -> None:
    engine = {"sglang": {"router": "http://127.0.0.1:1"}}
    addresses = {"gateway": "127.0.0.1:0", "http": "0.0.0.0:0"}
    with pytest.raises(ConfigError, match=r"an address that the router can reach"):
        async with serve_gateway(
            engine=engine, addresses=addresses, security={"allow_insecure": True}
        ):
            pass


# ---- SGLang's own router


def installed() -> bool:
    """Whether there is one."""
    asked = [PYTHON, "-c", "import sglang_router"]
    return subprocess.run(asked, capture_output=True, timeout=patient(30)).returncode == 0


@asynccontextmanager
async def routed(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """SGLang's router on a port of its own, by the routing keys of its callers."""
    port, metrics_port = free_ports(2)
    command = f"-m sglang_router.launch_router --host 127.0.0.1 --port {port} --policy manual"
    command += f" --prometheus-host 127.0.0.1 --prometheus-port {metrics_port}"
    command += f" --worker-startup-check-interval 1 --control-plane-api-keys 1:test:admin:{KEY}"
    log = folder / "router.log"
    process = await asyncio.create_subprocess_shell(
        f"exec {shlex.quote(PYTHON)} {command} > {shlex.quote(str(log))} 2>&1"
    )
    base = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=base, timeout=patient(20), verify=NO_AUTHORITIES) as http:
        try:
            yield http
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), patient(30))


async def until_listed(http: httpx.AsyncClient, count: int) -> None:
    """Until the router is there and knows so many gateways."""

    async def known() -> int:
        try:
            listed = await http.get("/workers", headers={"authorization": f"Bearer {KEY}"})
            return int(listed.json()["total"])
        except httpx.TransportError:
            return -1

    until = time.monotonic() + patient(40)
    while await known() != count:
        assert time.monotonic() < until
        await asyncio.sleep(0.1)


def told(model_dir: Path, answer: str) -> dict[str, Any]:
    """A script that always gives the same answer."""
    codec = TextCodec(model_dir)
    return {
        "script": [
            {"prompt": codec.encode("1+1="), "responses": [[*codec.encode(answer)[1:], EOS]]}
        ]
    }


@pytest.mark.skipif(not installed(), reason="sglang-router is not installed; SGLANG_ROUTER_PYTHON")
async def test_sglangs_own_router_hands_on_and_keeps_callers_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_router, "LOOK_S", 0.2)
    monkeypatch.setenv("PACELINE_ROUTER_KEY", KEY)
    answers = ("1+1=2", "1+1=3")
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    models = [tiny_model(folder / "tiny-model") for folder in folders]
    scripts = [told(model, answer) for model, answer in zip(models, answers, strict=True)]
    for model, script in zip(models, scripts, strict=True):
        teach(model, script)
    async with routed(tmp_path) as http:
        engine = {"max_sequence_tokens": 4096, "sglang": {"router": str(http.base_url)}}
        async with serving(models[0], scripts[0], engine=engine):
            async with serving(models[1], scripts[1], engine=engine):
                await until_listed(http, 2)
                said = {key: await ask_three_times(http, key) for key in map(str, range(8))}
                assert all(len(set(texts)) == 1 for texts in said.values())
                assert {texts[0] for texts in said.values()} == set(answers)
                await other_calls(http)
            await until_listed(http, 1)
            assert await ask_three_times(http, "new") == ["1+1=2"] * 3


async def ask_three_times(http: httpx.AsyncClient, key: str) -> list[str]:
    """Texts of three completions with one routing key."""
    texts = []
    for _ in range(3):
        answer = await http.post(
            "/v1/completions",
            json={"model": "tiny-model", "prompt": "1+1="},
            headers={"x-smg-routing-key": key},
        )
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
    return texts


async def other_calls(http: httpx.AsyncClient) -> None:
    """Chats, responses and streams come through; sessions, further fields and token ids do not."""
    asked = {"model": "tiny-model", "prompt": "1+1="}
    streamed = await http.post("/v1/completions", json={**asked, "stream": True})
    assert streamed.status_code == 200, streamed.text
    assert streamed.text.rstrip().endswith("data: [DONE]")
    messages = [{"role": "user", "content": "1+1="}]
    chat = await http.post("/v1/chat/completions", json={**asked, "messages": messages})
    assert chat.json()["choices"][0]["message"]["role"] == "assistant", chat.text
    response = await http.post("/v1/responses", json={"model": "tiny-model", "input": "1+1="})
    assert response.json()["object"] == "response", response.text
    for path, kept in (("/v1/completions", True), ("/v1/chat/completions", False)):
        body = {**asked, "messages": messages, "return_token_ids": True}
        del body["prompt" if "chat" in path else "messages"]
        ids = await http.post(path, json=body)
        assert bool(ids.json()["choices"][0].get("token_ids")) is kept, ids.text
    assert (await http.post("/v1/completions", json={**asked, "prompt": [1, 2]})).is_client_error
    for path in ("/v1/sessions", "/v1/messages", "/tokenize"):
        assert (await http.post(path, json={})).status_code == 404


async def test_a_request_with_two_tokens_is_refused(serve_gateway: ServeGateway) -> None:
    headers = [("authorization", "Bearer of-the-proxy"), ("authorization", "Bearer of-the-caller")]
    async with serve_gateway() as served:
        asked = {"prompt": "1+1="}
        answer = await served.http.post("/v1/completions", json=asked, headers=headers)
        assert answer.status_code == 401
        assert "two tokens" in answer.json()["error"]["message"]
