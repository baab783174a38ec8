"""Promises of docs/api.md beyond OpenAI's fields, over HTTP with both engines; log-probs of prompts
are compared with transformers.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from integration.gateway.conftest import POLICY_MODEL, Served, serving, tiny_model
from transformers import AutoModelForCausalLM

from paceline.local.patience import patient
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

pytestmark = pytest.mark.asyncio(loop_scope="module")
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)],
)
async def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    model_dir = tiny_model(tmp_path_factory.mktemp("extras") / "beside")
    engine = {"kind": request.param, "max_sequence_tokens": 128}
    async with serving(model_dir, {}, model=str(POLICY_MODEL), engine=engine) as one:
        yield one


async def ask(model: Served, path: str = "completions", **body: Any) -> dict[str, Any]:
    answer = await model.http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def pieces(model: Served, **body: Any) -> list[dict[str, Any]]:
    answer = await model.http.post("/v1/completions", json={**body, "stream": True})
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line)["choices"][0] for line in lines]


def forward(ids: list[int]) -> torch.Tensor:
    """Log-probs [T, V] of the next token, computed with transformers."""
    oracle = AutoModelForCausalLM.from_pretrained(POLICY_MODEL, dtype=torch.float32)
    with torch.inference_mode():
        return torch.log_softmax(oracle(torch.tensor([ids])).logits[0].float(), dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize("generated", [0, 1])
async def test_the_likelihood_of_answers_is_scored_as_evaluation_harnesses_ask_for_it(
    model: Served, generated: int
) -> None:
    """Scores contexts and continuations, given as token ids, as a harness reads them.

    The continuation's log-prob is a sum; the continuation is greedy if no alternative is likelier.
    """
    context, answers = model.codec.encode("12+30="), ["12+30=42", "7", "42#"]
    asked = [[*context, *model.codec.encode_piece(text)] for text in answers]
    answer = await ask(
        model,
        prompt=asked,
        max_tokens=generated,
        echo=True,
        logprobs=1,
        temperature=0,
        seed=1234,
    )
    assert answer["usage"]["completion_tokens"] == generated * len(asked)
    for choice, ids in zip(answer["choices"], asked, strict=True):
        logprobs, end = choice["logprobs"], len(ids)
        values, tops = logprobs["token_logprobs"], logprobs["top_logprobs"]
        assert len(values) == len(tops) == len(logprobs["tokens"]) == end + generated
        assert (values[0], tops[0]) == (None, None)
        wanted = forward(ids)
        steps = range(len(context), end)
        expected = sum(float(wanted[at - 1, ids[at]]) for at in steps)
        assert sum(values[len(context) : end]) == pytest.approx(expected, abs=1e-3)
        greedy = all(max(tops[at].values()) == values[at] for at in steps)
        assert greedy == all(int(wanted[at - 1].argmax()) == ids[at] for at in steps)
        assert choice["text"].startswith(model.codec.decode_all(ids))
        assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]


async def test_an_echo_is_the_prompt_as_it_was_given_whole_and_streamed(model: Served) -> None:
    body = {"prompt": "1+1=", "echo": True, "logprobs": 2, "max_tokens": 6, **GREEDY}
    (whole,) = (await ask(model, **body))["choices"]
    (plain,) = (await ask(model, **{**body, "echo": False}))["choices"]
    assert whole["text"] == "1+1=" + plain["text"]
    parts = await pieces(model, **body)
    assert "".join(part["text"] for part in parts) == whole["text"]
    streamed = {
        name: [one for part in parts for one in part["logprobs"][name]]
        for name in ("tokens", "token_logprobs", "text_offset")
    }
    for name in ("tokens", "text_offset"):
        assert streamed[name] == whole["logprobs"][name]
    assert streamed["token_logprobs"][0] is whole["logprobs"]["token_logprobs"][0] is None
    scores = whole["logprobs"]["token_logprobs"][1:]
    assert streamed["token_logprobs"][1:] == pytest.approx(scores, abs=1e-4)
    assert whole["logprobs"]["tokens"][-6:] == plain["logprobs"]["tokens"]


async def test_log_probs_and_ids_of_a_prompt_stand_where_vllm_puts_them(model: Served) -> None:
    ids = [*model.codec.encode("12+30=42")]
    asked = {"prompt_logprobs": 2, "return_token_ids": True, "max_tokens": 3, **GREEDY}
    (choice,) = (await ask(model, prompt=ids, **asked))["choices"]
    assert choice["prompt_token_ids"] == ids
    wanted, scores = forward(ids), choice["prompt_logprobs"]
    assert scores[0] is None
    for place, (token, row) in enumerate(zip(ids[1:], scores[1:], strict=True)):
        own = row[str(token)]
        assert own["logprob"] == pytest.approx(float(wanted[place, token]), abs=1e-4)
        assert own["rank"] == int((wanted[place] > wanted[place, token]).sum()) + 1
        assert own["decoded_token"] == model.codec.token_text(token)
        assert {str(one) for one in wanted[place].topk(2).indices.tolist()} <= set(row)
    messages = [{"role": "user", "content": "1+1="}]
    chat = await ask(model, "chat/completions", messages=messages, n=2, **asked)
    assert len(chat["prompt_token_ids"]) == len(chat["prompt_logprobs"])
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert all("prompt_logprobs" not in choice for choice in chat["choices"])


async def test_a_choice_says_what_ended_it_and_the_text_ends_before(model: Served) -> None:
    asked: dict[str, Any] = {"prompt": "1+1=", "return_token_ids": True, "max_tokens": 8, **GREEDY}
    (free,) = (await ask(model, **asked))["choices"]
    assert (free["finish_reason"], free["stop_reason"]) == ("length", None)
    token = free["token_ids"][2]
    first = free["token_ids"].index(token)
    end = model.codec.token_text(token)
    text = model.codec.decode(free["token_ids"][:first])
    for keep in (False, True):
        shown = text + end * keep
        by_token = {**asked, "stop_token_ids": [token], "include_stop_str_in_output": keep}
        by_text = {**asked, "stop": end, "include_stop_str_in_output": keep}
        for body, reason in ((by_token, token), (by_text, end)):
            (choice,) = (await ask(model, **body))["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
            assert (choice["text"], choice["token_ids"][-1]) == (shown, token)
            parts = await pieces(model, **body)
            assert "".join(part["text"] for part in parts) == shown
            assert parts[-1]["stop_reason"] == reason


async def test_tokens_at_least_and_some_tokens_alone_hold_over_http(model: Served) -> None:
    asked: dict[str, Any] = {"prompt": "1+1=", "return_token_ids": True, "max_tokens": 12, "n": 4}
    free = await ask(model, **asked, seed=3)
    ends = sorted({token for one in free["choices"] for token in one["token_ids"]})
    for choice in (await ask(model, **asked, seed=3, stop_token_ids=ends, min_tokens=7))["choices"]:
        assert not set(choice["token_ids"][:7]) & set(ends)
        assert len(choice["token_ids"]) >= 7
    for choice in (await ask(model, **asked, seed=3, allowed_token_ids=[7, 9]))["choices"]:
        assert set(choice["token_ids"]) <= {7, 9}
    digits = [*model.codec.encode_piece("12")]
    stopped = await ask(model, **asked, seed=3, stop="1", min_tokens=7, allowed_token_ids=digits)
    for choice in stopped["choices"]:
        said = model.codec.decode(choice["token_ids"])
        assert set(said) <= {"1", "2"}
        assert len(said) == (12 if "1" not in said[6:] else 7 + said[6:].index("1"))
        assert choice["text"] == (said[:-1] if "1" in said[6:] else said)


async def test_all_tokens_are_kept_by_minus_one_null_and_nothing(model: Served) -> None:
    asked: dict[str, Any] = {"prompt": "1+1=", "seed": 5, "max_tokens": 8}
    texts = [
        (await ask(model, **asked, **more))["choices"][0]["text"]
        for more in ({}, {"top_k": -1}, {"top_k": None}, {"top_k": 0})
    ]
    assert len(set(texts)) == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "1" * 500}, "prompt"),
        ("completions", {"prompt": [5] * 500}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": "1" * 500}]}, "messages"),
        ("responses", {"input": "1" * 500}, "input"),
    ],
)
async def test_a_prompt_that_is_too_long_has_openais_code(
    model: Served, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await model.http.post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


async def test_the_same_is_asked_over_grpc(model: Served) -> None:
    ids = model.codec.encode("12+30=42")
    request = rpb.GenerateRequest(
        sampling=tpb.SamplingParams(
            temperature=1.0,
            max_tokens=5,
            prompt_logprobs=1,
            allowed_token_ids=[9, 7, 9],
            min_tokens=5,
        ),
        token_ids=rpb.TokenIds(ids=ids),
        return_prompt_token_ids=True,
    )
    news = [one async for one in model.stub.Generate(request, timeout=patient(20))]
    assert [*news[-1].prompt_token_ids] == [*ids]
    scores = [score for one in news for score in one.chunk.prompt_scores]
    assert [len(score.top.token_ids) for score in scores] == [1] * (len(ids) - 1)
    wanted = forward([*ids])
    for place, (score, token) in enumerate(zip(scores, ids[1:], strict=True)):
        assert score.logprob == pytest.approx(float(wanted[place, token]), abs=1e-4)
    tokens = [token for one in news for token in one.chunk.token_ids]
    assert len(tokens) == 5
    assert set(tokens) <= {7, 9}


async def test_a_text_over_grpc_gets_the_special_tokens_that_it_asks_for(model: Served) -> None:
    asked = {"sampling": tpb.SamplingParams(temperature=1.0, max_tokens=1)}
    for special in (None, True, False):
        request = rpb.GenerateRequest(
            text="12+30=",
            return_prompt_token_ids=True,
            add_special_tokens=special,
            **asked,
        )
        news = [one async for one in model.stub.Generate(request, timeout=patient(20))]
        ids = model.codec.encode("12+30=", special=special is not False)
        assert tuple(news[-1].prompt_token_ids) == ids
    assert model.codec.encode("12+30=")[1:] == ids


async def test_what_was_only_scored_leaves_no_turn_and_a_confined_draw_is_not_trained(
    model: Served,
) -> None:
    opened = (await model.http.post("/v1/sessions", json={})).json()
    key = {"authorization": f"Bearer {opened['api_key']}"}
    body = {"prompt": "1+1=", "echo": True, "logprobs": 0, "max_tokens": 0}
    scored = await model.http.post("/v1/completions", json=body, headers=key)
    assert scored.status_code == 200, scored.text
    for more in ({"min_tokens": 2}, {"allowed_token_ids": [7]}):
        asked = {"prompt": "1+1=", "max_tokens": 4, **more}
        refused = await model.http.post("/v1/completions", json=asked, headers=key)
        assert refused.status_code == 400
        assert next(iter(more)) in refused.json()["error"]["message"]
    tree = await model.http.get(f"/v1/sessions/{opened['id']}/export?form=tree", headers=key)
    assert tree.json()["tree"] == []
