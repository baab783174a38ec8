"""Gateways behind SGLang's own router, where it is installed.

$SGLANG_ROUTER_PYTHON names the Python with `sglang-router`, because that package brings its own web
server.
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
from integration.gateway.conftest import EOS, NO_AUTHORITIES, ServeGateway, serving, tiny_model
from integration.gateway.conversations import teach

from paceline.local.patience import patient
from paceline.local.ports import free_ports
from paceline.services.rollout_gateway.chat.text import TextCodec

PYTHON = os.environ.get("SGLANG_ROUTER_PYTHON", sys.executable)


def installed() -> bool:
    """Whether the router is installed."""
    asked = [PYTHON, "-c", "import sglang_router"]
    return subprocess.run(asked, capture_output=True, timeout=patient(30)).returncode == 0


@asynccontextmanager
async def routed(folder: Path, *gateways: str) -> AsyncIterator[httpx.AsyncClient]:
    """SGLang's router in front of the gateways, on a separate port; it uses callers' routing keys."""
    port, metrics_port = free_ports(2)
    command = f"-m sglang_router.launch_router --host 127.0.0.1 --port {port} --policy manual"
    command += f" --prometheus-host 127.0.0.1 --prometheus-port {metrics_port}"
    command += f" --worker-startup-check-interval 1 --worker-urls {' '.join(gateways)}"
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
    """Waits until the router is ready and lists so many gateways."""

    async def listed() -> int:
        try:
            return int((await http.get("/workers")).json()["total"])
        except httpx.TransportError:
            return -1

    until = time.monotonic() + patient(40)
    while await listed() != count:
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
    tmp_path: Path,
) -> None:
    answers = ("1+1=2", "1+1=3")
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    models = [tiny_model(folder / "tiny-model") for folder in folders]
    scripts = [told(model, answer) for model, answer in zip(models, answers, strict=True)]
    for model, script in zip(models, scripts, strict=True):
        teach(model, script)
    engine = {"max_sequence_tokens": 4096}
    async with (
        serving(models[0], scripts[0], engine=engine) as first,
        serving(models[1], scripts[1], engine=engine) as second,
        routed(tmp_path, *(str(one.http.base_url).rstrip("/") for one in (first, second))) as http,
    ):
        await until_listed(http, 2)
        said = {key: await ask_three_times(http, key) for key in map(str, range(8))}
        assert all(len(set(texts)) == 1 for texts in said.values())
        assert {texts[0] for texts in said.values()} == set(answers)
        await other_calls(http)


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
    """Chats, responses and streams pass; sessions, further fields and token ids do not."""
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
