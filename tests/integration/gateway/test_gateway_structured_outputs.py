"""Structured outputs and tool calls under a grammar: OpenAI's client requests them over HTTP from
the embedded engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest
import pytest_asyncio
from integration.gateway.conftest import Served, serving, sums, tiny_model
from integration.gateway.conversations import naming_tokenizer

from paceline.local.patience import patient

pytestmark = pytest.mark.asyncio(loop_scope="module")
POLICY = str(Path(__file__).parents[3] / "examples" / "demo" / "policy_start")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z][a-z]{1,4}$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
NOW = {
    "name": "now",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS: list[Any] = [{"type": "function", "function": one} for one in (WEATHER, NOW)]
ASK: Any = [{"role": "user", "content": "48:36="}]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    model_dir = tiny_model(tmp_path_factory.mktemp("structured") / "tiny-model")
    async with serving(
        model_dir,
        sums(model_dir),
        model=POLICY,
        drafter="ngram",
        engine={"kind": "embedded", "workers": 1},
        chat={"tool_format": "qwen3_coder"},
        tokenizer=naming_tokenizer(Path(POLICY), model_dir.parent / "naming"),
    ) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(gateway: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    url, own = f"{gateway.http.base_url}/v1", {"timeout": patient(30), "max_retries": 0}
    async with openai.AsyncOpenAI(base_url=url, api_key="none", **own) as opened:
        yield opened


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[a-c]{2}-[0-9]{1,3}"}, "[a-c]{2}-[0-9]{1,3}"),
    ({"choice": ["red", "blue, or not"]}, "red|blue, or not"),
    ({"grammar": 'start: "(" /[xyz]/ ")"'}, r"\([xyz]\)"),
    ({"grammar": 'root ::= "(" [xyz] ")"'}, r"\([xyz]\)"),
    ({"json": {"enum": [1, "a"]}}, '1|"a"'),
    ({"json": '{"enum": [1, "a"]}'}, '1|"a"'),
]


@pytest.mark.slow
@pytest.mark.parametrize(("demand", "form"), FORMS)
async def test_an_answer_has_the_form_that_was_asked_for(
    client: openai.AsyncOpenAI, demand: dict[str, Any], form: str
) -> None:
    extra = {"structured_outputs": demand}
    spoken = await client.chat.completions.create(
        model="policy_start", messages=ASK, max_tokens=150, extra_body=extra, seed=3
    )
    assert spoken.choices[0].finish_reason == "stop"
    assert re.fullmatch(form, spoken.choices[0].message.content or "")
    told = await client.completions.create(
        model="policy_start", prompt="48:36=", max_tokens=150, extra_body=extra, seed=4, n=2
    )
    assert all(re.fullmatch(form, choice.text) for choice in told.choices)


async def test_completions_take_a_response_format(client: openai.AsyncOpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
    told = await client.completions.create(
        model="policy_start",
        prompt="1=",
        max_tokens=150,
        extra_body={"response_format": form},
        seed=2,
    )
    assert jsonschema_rs.is_valid(SCHEMA, json.loads(told.choices[0].text))


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_asked_for_is_made_with_valid_arguments(
    client: openai.AsyncOpenAI, choice: Any, stream: bool
) -> None:
    asked: dict[str, Any] = {
        "model": "policy_start",
        "messages": ASK,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 300,
    }
    for seed in range(3):
        if stream:
            async with client.chat.completions.stream(**asked, seed=seed) as news:
                answer: Any = await news.get_final_completion()
        else:
            answer = await client.chat.completions.create(**asked, seed=seed)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert not message.content
        (call,) = message.tool_calls
        schema = {"weather": SCHEMA, "now": NOW["parameters"]}[call.function.name]
        assert jsonschema_rs.is_valid(schema, json.loads(call.function.arguments))
        assert choice == "required" or call.function.name == "weather"


GROWING = "(((a|b?c)*[a-z]{0,900}){0,900}d){0,900}" * 200 + "e{20}"
"""The grammar is built in time, but exceeds a step's limits after some tokens."""
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("structured_outputs.regex", {"structured_outputs": {"regex": GROWING}, "max_tokens": 250}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "(["}}),
    ("structured_outputs.grammar", {"structured_outputs": {"grammar": "start: nothing"}}),
    ("structured_outputs.choice", {"structured_outputs": {"choice": ["a", ""]}}),
    ("structured_outputs.choice", {"structured_outputs": {"choice": []}}),
    ("structured_outputs.json", {"structured_outputs": {"json": {"type": "objct"}}}),
    ("structured_outputs.json", {"structured_outputs": {"json": "no json"}}),
    ("structured_outputs", {"structured_outputs": {}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
    ("structured_outputs.whitespace_pattern", {"structured_outputs": {"whitespace_pattern": "x"}}),
    (
        "structured_outputs",
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    ),
    ("tools", {"structured_outputs": {"regex": "a"}, "tools": TOOLS, "tool_choice": "required"}),
    (
        "tools",
        {
            "tools": [{"type": "function", "function": {**WEATHER, "name": "two words"}}],
            "tool_choice": "required",
        },
    ),
    (
        "tools",
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"anyOf": []}, "strict": True},
                }
            ],
        },
    ),
]


@pytest.mark.parametrize(("field", "change"), REFUSED)
async def test_what_cannot_be_followed_is_400_with_its_field(
    gateway: Served, field: str, change: dict[str, Any]
) -> None:
    answer = await gateway.http.post("/v1/chat/completions", json={"messages": ASK, **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field, answer.text


async def test_a_session_to_be_trained_leaves_calls_to_the_policy_and_refuses_a_form(
    gateway: Served,
) -> None:
    opened = (await gateway.http.post("/v1/sessions", json={})).json()
    headers = {"authorization": f"Bearer {opened['api_key']}"}
    body = {"messages": ASK, "max_tokens": 8, "tools": TOOLS, "tool_choice": NAMED}
    free = await gateway.http.post("/v1/chat/completions", json=body, headers=headers)
    assert free.status_code == 200, free.text
    refused = await gateway.http.post(
        "/v1/chat/completions",
        json={"messages": ASK, "structured_outputs": {"regex": "a"}},
        headers=headers,
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_trainable")
