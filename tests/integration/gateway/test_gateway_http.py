"""OpenAI's API over HTTP on a real port."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import httpx
import pytest

from paceline.local.patience import patient
from paceline.v1 import rollout_pb2 as rpb


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def complete(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post("/v1/completions", json={"prompt": "2+2=", "max_tokens": 64, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_completions_by_text_and_by_token_ids(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        codec = served.codec
        answer = await complete(
            served.http, model="tiny-model", seed=1, return_token_ids=True, logprobs=2
        )
        assert answer["model"] == "tiny-model"
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("2+2=5 #5", "stop")
        assert choice["token_ids"] == [*codec.encode("2+2=5 #5")[1:], 1]
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
        assert len(choice["logprobs"]["top_logprobs"][0]) == 2
        assert answer["usage"]["prompt_tokens"] == 5
        assert answer["usage"]["completion_tokens"] == 9

        ids = list(codec.encode("1+1="))
        many = await complete(served.http, prompt=[ids, ids], n=2, seed=0)
        assert [choice["text"] for choice in many["choices"]] == ["1+1=2 #2", "1+1=3 #3"] * 2
        assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
        assert many["usage"]["prompt_tokens"] == 10

        longer = await complete(served.http, ignore_eos=True, max_tokens=12, return_token_ids=True)
        assert len(longer["choices"][0]["token_ids"]) == 12
        assert longer["choices"][0]["finish_reason"] == "length"


async def test_streams_join_to_the_whole_answer(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        body = {
            "prompt": "1+1=",
            "max_tokens": 64,
            "n": 2,
            "seed": 0,
            "stream": True,
            "return_token_ids": True,
        }
        pieces = events((await served.http.post("/v1/completions", json=body)).text)
        for index, text in enumerate(("1+1=2 #2", "1+1=3 #3")):
            own = [p["choices"][0] for p in pieces if p["choices"][0]["index"] == index]
            assert "".join(one["text"] for one in own) == text
            assert [t for one in own for t in one["token_ids"]] == [
                *served.codec.encode(text)[1:],
                1,
            ]
            assert [one["finish_reason"] for one in own][-1] == "stop"


async def test_chat_uses_the_template_and_streams_deltas(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        messages = [
            {
                "role": "user",
                "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2="}],
            }
        ]
        body = {"messages": messages, "max_completion_tokens": 64, "stop": " #", "logprobs": True}
        answer = (await served.http.post("/v1/chat/completions", json=body)).json()
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "2+2=5"}
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["logprobs"]["content"][0]["token"] == "2"
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        pieces = events((await served.http.post("/v1/chat/completions", json=body)).text)
        deltas = [piece["choices"][0]["delta"] for piece in pieces if piece["choices"]]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta["content"] for delta in deltas) == "2+2=5"
        assert pieces[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
        assert not any("usage" in piece for piece in pieces[:-1])
        body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "n": 2}
        *pieces, last = events((await served.http.post("/v1/chat/completions", json=body)).text)
        for index in range(2):  # each choice counts its own tokens, and its whole prompt
            of_choice = [one["usage"] for one in pieces if one["choices"][0]["index"] == index]
            counts = [one["completion_tokens"] for one in of_choice]
            assert counts == sorted(counts)
            assert counts[-1] == answer["usage"]["completion_tokens"]
            assert {one["prompt_tokens"] for one in of_choice} == {last["usage"]["prompt_tokens"]}


BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "1", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "1", "max_tokens": "many"}, "max_tokens"),
    ({"prompt": "1", "temperature": 11}, "temperature"),
    ({"prompt": "1", "top_p": 0}, "top_p"),
    ({"prompt": "1", "n": 0}, "n"),
    ({"prompt": {"text": 1}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [99999]}, "prompt"),
    ({"prompt": [5] * 600}, "prompt"),
    ({"prompt": "1", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "1", "suffix": "2"}, "suffix"),
    ({"prompt": "1", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "1", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"prompt": "1", "stop_token_ids": [320]}, "stop_token_ids"),
    ({"prompt": "1", "allowed_token_ids": []}, "allowed_token_ids"),
    ({"prompt": "1", "min_tokens": 17}, "min_tokens"),
    ({"prompt": "1", "no_such_field": False}, "no_such_field"),
    ({"prompt": "1", "stream_options": {"x": 1}}, "stream_options.x"),
    ({"prompt": "1", "stop": [""]}, "stop"),
    ({"prompt": "1", "presence_penalty": 2.5}, "presence_penalty"),
    ({"prompt": "1", "frequency_penalty": "much"}, "frequency_penalty"),
    ({"prompt": "1", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "1", "logit_bias": {"5": 101}}, "logit_bias"),
    ({"prompt": "1", "logit_bias": {"five": 1}}, "logit_bias"),
    ({"prompt": "1", "logit_bias": {"320": 1}}, "logit_bias"),
    ({"prompt": "1", "logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias"),
    ({}, "prompt"),
]


async def test_wrong_fields_get_400_naming_the_field(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        for body, field in BAD_BODIES:
            response = await served.http.post("/v1/completions", json=body)
            assert response.status_code == 400, (body, response.text)
            error = response.json()["error"]
            assert error["param"] == field, (body, error)
            assert error["type"] == "invalid_request_error"
        for raw in (b"{", b'{"prompt": "\xff"}', b'{"prompt": "1", "temperature": NaN}', b"[]"):
            response = await served.http.post(
                "/v1/completions", content=raw, headers={"content-type": "application/json"}
            )
            assert response.status_code == 400, (raw, response.text)
        unknown = await served.http.post(
            "/v1/completions", json={"prompt": "2+2=", "max_tokens": 1, "user": "me"}
        )
        assert unknown.status_code == 200
        missing = await served.http.post("/v1/chat/completions", json={"messages": []})
        assert missing.json()["error"]["param"] == "messages"


async def test_penalties_of_an_engine_without_them_are_refused_by_capability_and_setting(
    serve_gateway: Any,
) -> None:
    async with serve_gateway() as served:
        for asked in (
            {"presence_penalty": 1},
            {"repetition_penalty": 1.2},
            {"logit_bias": {"5": 1}},
        ):
            response = await served.http.post("/v1/completions", json={"prompt": "1", **asked})
            assert response.status_code == 400, (asked, response.text)
            message = response.json()["error"]["message"]
            assert "capability penalties" in message
            assert "engine.kind=embedded" in message
        off = {
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1,
            "logit_bias": None,
        }
        assert (await complete(served.http, **off))["choices"]


async def test_models_and_health(serve_gateway: Any) -> None:
    async with serve_gateway() as served:
        assert (await served.http.get("/v1/models")).json()["data"][0]["id"] == "tiny-model"
        assert (await served.http.get("/health")).json()["status"] == "ok"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_the_engine(
    serve_gateway: Any, script: dict[str, Any], stream: bool
) -> None:
    script |= {"real_time": True, "default_cost_s": 0.01, "costs_s": {}, "arms": ["off"]}
    async with serve_gateway() as served:
        body = {"prompt": "2+2=", "max_tokens": 450, "ignore_eos": True, "stream": stream}

        async def load() -> int:
            status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
            return int(status.workers[0].health.running)

        call = asyncio.create_task(served.http.post("/v1/completions", json=body))
        async with asyncio.timeout(patient(10)):
            while not await load():
                pass
            call.cancel()
            while await load():
                pass
        status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
        assert status.workers[0].health.tokens_emitted < 450


@pytest.mark.slow
def test_the_gateway_process_imports_no_torch() -> None:
    code = (
        "import sys, paceline.services.rollout_gateway.server; sys.exit('torch' in sys.modules or 'transformers' "
        "in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, timeout=patient(60)).returncode
        == 0
    )


async def test_with_a_token_in_the_environment_requests_need_it(
    serve_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    async with serve_gateway() as served:
        assert (await served.http.get("/v1/models")).status_code == 401
        allowed = await served.http.get("/v1/models", headers={"authorization": "Bearer secret"})
        assert allowed.status_code == 200
