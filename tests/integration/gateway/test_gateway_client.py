"""The Python client, both kinds, against a real gateway over the scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from unit.client.in_thread import InThread

from paceline.client import AsyncClient, Client
from paceline.errors import InvalidInput
from paceline.v1 import rollout_pb2 as rpb

TOKEN = "the-gateways-token"
Connect = Callable[..., Any]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture(params=["sync", "async"])
async def connect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Connect]:
    """`connect(served)`: a client of either kind that has the gateway's token, which the gateway asks for."""
    monkeypatch.setenv("PACELINE_TOKEN", TOKEN)
    async with AsyncExitStack() as clients:

        def make(served: Any, **options: Any) -> Any:
            url = str(served.http.base_url)
            options = {"token": TOKEN, "deadline_s": 15.0, "generation_deadline_s": 15.0, **options}
            client: Any = InThread(Client(url, **options)) if request.param == "sync" else AsyncClient(url, **options)
            clients.push_async_callback(client.close)
            return client

        yield make


async def test_models_health_and_a_wrong_token(serve_gateway: Any, connect: Connect) -> None:
    async with serve_gateway(engine={"workers": 1}) as served:
        client = connect(served)
        assert await client.models() == ("tiny-model",)
        assert (await client.health())["status"] == "ok"
        with pytest.raises(InvalidInput) as caught:
            await connect(served, token="another").models()
        assert caught.value.reason == "UNAUTHENTICATED"


async def test_tokens_go_in_and_come_out_as_they_are(serve_gateway: Any, connect: Connect) -> None:
    async with serve_gateway(engine={"workers": 1}) as served:
        caller = connect(served).attach(TOKEN)
        tokens = await caller.generate(list(served.codec.encode("1+1=")), max_tokens=64, seed=1)
        assert tokens.token_ids == (*served.codec.encode("1+1=3 #3")[1:], 1)
        assert tokens.logprobs == tuple(-(1 + token % 7) / 8 for token in tokens.token_ids)  # the script's
        assert (tokens.text, tokens.finish_reason, tokens.usage.prompt_tokens) == ("1+1=3 #3", "stop", 5)
        assert (await caller.generate("1+1=", max_tokens=64, seed=0)).text == "1+1=2 #2"
        with pytest.raises(InvalidInput, match="max_tokens"):
            await caller.generate("1+1=", max_tokens=-1)


async def test_a_streamed_answer_is_the_whole_one(serve_gateway: Any, connect: Connect) -> None:
    async with serve_gateway(engine={"workers": 1}) as served:
        caller = connect(served).attach(TOKEN)
        whole = await caller.chat([user("2+2=")], max_tokens=64, return_token_ids=True)
        assert (whole.text, whole.message["role"], whole.tool_calls) == ("2+2=5 #5", "assistant", ())
        stream = caller.chat_stream([user("2+2=")], max_tokens=64, return_token_ids=True)
        assert "".join([str(delta) async for delta in stream]) == whole.text
        joined = stream.answer()
        assert (joined.message, joined.token_ids, joined.usage) == (whole.message, whole.token_ids, whole.usage)
        assert joined.finish_reason == whole.finish_reason == "stop"


async def test_leaving_a_stream_frees_the_engine(serve_gateway: Any, connect: Connect, script: dict[str, Any]) -> None:
    script |= {"real_time": True, "default_cost_s": 0.01, "costs_s": {}, "arms": ["off"]}
    async with serve_gateway(engine={"workers": 1}) as served:
        stream = connect(served).attach(TOKEN).chat_stream([user("2+2=")], max_tokens=450, ignore_eos=True)
        async for _ in stream:
            break
        await stream.close()
        async with asyncio.timeout(10):
            while (await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=5)).workers[0].health.running:
                pass
