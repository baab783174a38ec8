"""Errors for bad requests have the shape of the client's API and name the field; the gateway
survives.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest

from paceline.local.patience import patient
from paceline.services.rollout_gateway.api.http.requests import MAX_BODY_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHAT, RESPONSES, MESSAGES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
)
COUNT, SESSIONS, REWARDS = "/v1/messages/count_tokens", "/v1/sessions", "/v1/rewards"
JSON = {"content-type": "application/json"}
HI = [{"role": "user", "content": "Hi"}]
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi"},
    CHAT: {"messages": HI},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": HI, "max_tokens": 4},
    COUNT: {"messages": HI},
    SESSIONS: {},
    REWARDS: {"completion_id": "x", "value": 1},
}
"""Smallest valid body of each path."""
SPEAKING = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)
CHATTING = {CHAT: "messages", RESPONSES: "input", MESSAGES: "messages", COUNT: "messages"}
"""Field of the conversation in each path that takes one."""


def told(path: str, answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Asserts the error's shape for the path's API; returns the error."""
    assert answer.status_code == status, (path, answer.status_code, answer.text[:500])
    body = answer.json()
    error = dict(body["error"])
    if path.startswith(MESSAGES):
        assert body["type"] == "error"
        assert set(error) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


async def refused(http: httpx.AsyncClient, path: str, field: str, body: dict[str, Any]) -> None:
    """Asserts a 400 that names the field."""
    error = told(path, await http.post(path, json={**GOOD[path], **body}))
    if path.startswith(MESSAGES):
        assert error["message"].startswith(field), (path, body, error)
    else:
        assert error["param"] == field, (path, body, error)
    assert error["type"] == "invalid_request_error"


@asynccontextmanager
async def still_well(served: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Asserts that the gateway answers valid requests afterwards."""
    yield served.http
    for path in SPEAKING:
        answer = await served.http.post(path, json=GOOD[path])
        assert answer.status_code == 200, (path, answer.text)


async def test_bodies_that_are_no_json_of_a_fit_size_are_refused_everywhere(
    served: Any,
) -> None:
    async with still_well(served) as http:
        for path, good in GOOD.items():
            deep = b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}"
            for raw in (
                b"{",
                b"[]",
                b'"x"',
                b"\xff\xfe",
                b'{"model": "\xff"}',
                b'{"model": "\\ud800"}',
                deep,
            ):
                told(path, await http.post(path, content=raw, headers=JSON))
            whole = json.dumps({**good, "model": "x" * MAX_BODY_BYTES}).encode()
            assert told(path, await http.post(path, content=whole, headers=JSON), 413)["message"]


async def test_what_a_page_of_another_site_can_send_is_refused_everywhere(served: Any) -> None:
    async with still_well(served) as http:
        for path, good in GOOD.items():
            raw = json.dumps(good).encode()
            for media in ("text/plain", "application/x-www-form-urlencoded", "application/jsonp"):
                answer = await http.post(path, content=raw, headers={"content-type": media})
                assert media in told(path, answer, 415)["message"]
            assert (
                "no Content-Type" in told(path, await http.post(path, content=raw), 415)["message"]
            )
            for name in ("rebound.example", "rebound.example:8000", "10.0.0.9:8000", "unix:80", ""):
                answer = await http.post(path, json=good, headers={"host": name})
                assert "Host" in told(path, answer, 403)["message"]
            for origin in ("https://page.example", "null", "http://127.0.0.1:1"):
                answer = await http.post(path, json=good, headers={"origin": origin})
                assert "another site" in told(path, answer, 403)["message"]

        here = http.base_url.netloc.decode()
        for headers in (
            {"host": "localhost"},
            {"host": "[::1]:80"},
            {"origin": f"http://{here}"},
            {"content-type": "application/json; charset=utf-8"},
        ):
            answer = await http.post(
                COMPLETIONS, content=b'{"prompt": "Hi"}', headers=JSON | headers
            )
            assert answer.status_code == 200, answer.text


async def test_a_body_without_a_length_is_cut_off_at_the_limit(served: Any) -> None:
    async with still_well(served) as http:

        async def endless() -> AsyncIterator[bytes]:
            yield b'{"model": "'
            for _ in range(2 * MAX_BODY_BYTES // 65_536):
                yield b"x" * 65_536

        for path in (CHAT, MESSAGES):
            told(path, await http.post(path, content=endless(), headers=JSON), 413)


async def test_what_would_hold_everybody_up_is_refused_by_its_field(served: Any) -> None:
    long, call = "x" * 600_000, {"id": "a", "function": {"name": "f", "arguments": ""}}
    call["function"] = {"name": "f", "arguments": long}
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": long}
    tools = [{"type": "function", "function": {"name": f"f{one}"}} for one in range(1025)]
    async with still_well(served) as http:
        for path, field, body in (
            (CHAT, "messages", {"messages": HI * 4097}),
            (MESSAGES, "messages", {"messages": HI * 4097}),
            (RESPONSES, "input", {"input": HI * 4097}),
            (CHAT, "tools", {"tools": tools}),
            (CHAT, "stop", {"stop": ["x" * 1025]}),
            (COMPLETIONS, "logit_bias", {"logit_bias": {str(one): 1 for one in range(301)}}),
            (COMPLETIONS, "prompt[0]", {"prompt": [1.5] * 30_000}),
            (RESPONSES, "input[0].arguments", {"input": [item]}),
        ):
            await refused(http, path, field, body)
        arguments = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
        await refused(http, CHAT, "messages[0].tool_calls[0].function.arguments", arguments)
        for many in ({"model": [{}] * 8200}, {"prompt": [1] * 50_000}):
            told(COMPLETIONS, await http.post(COMPLETIONS, json={"prompt": "Hi", **many}), 413)


async def test_a_body_that_does_not_end_in_time_is_refused(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.rpc.http_requests.BODY_DEADLINE_S", 0.1)
    async with still_well(served) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            b'content-type: application/json\r\ncontent-length: 9\r\n\r\n{"model"'
        )
        assert (await asyncio.wait_for(reader.readline(), patient(10))).startswith(b"HTTP/1.1 408")
        writer.close()


@pytest.mark.parametrize(
    "parts", [[b"x: ", b"y" * 65_536], [b"a:b\r\n" * 10_000], [b"z:z\r\n" * 300 + b"\r\n"]]
)
async def test_a_head_without_bounds_is_refused(served: Any, parts: list[bytes]) -> None:
    async with still_well(served) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n" + parts[0])
        answer = b""
        with suppress(ConnectionError):
            for _ in range(100):  # far longer than the limit of a head
                writer.write(parts[-1])
                await writer.drain()
            answer = await asyncio.wait_for(reader.read(), patient(10))
        assert not answer or answer.startswith(b"HTTP/1.1 400")
        assert reader.at_eof() or answer or writer.is_closing()
        writer.close()


async def test_a_prompt_longer_than_the_model_reads_is_refused(served: Any) -> None:
    async with still_well(served) as http:
        long = "word " * 2000
        for path, body in {
            COMPLETIONS: {"prompt": long},
            CHAT: {"messages": [{"role": "user", "content": long}]},
            RESPONSES: {"input": long},
            MESSAGES: {"messages": [{"role": "user", "content": long}]},
        }.items():
            for stream in (False, True):
                answer = await http.post(path, json={**GOOD[path], **body, "stream": stream})
                assert "4095 tokens" in told(path, answer)["message"]


async def test_sampling_out_of_range_is_told_by_field(served: Any) -> None:
    async with still_well(served) as http:
        for path in SPEAKING:
            limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
            for wrong in (-1, 0, 2**31, 1.5, "many", [3]):
                await refused(http, path, limit, {limit: wrong})
            for wrong in (-0.1, 10.1, "hot", True, {}):
                await refused(http, path, "temperature", {"temperature": wrong})
            for wrong in (0, 1.1, "all"):
                await refused(http, path, "top_p", {"top_p": wrong})
            for number in ("NaN", "Infinity", "-Infinity", "1e999"):
                good = json.dumps(GOOD[path])[:-1]
                answer = await http.post(
                    path, content=f'{good}, "temperature": {number}}}'.encode(), headers=JSON
                )
                assert "temperature" in told(path, answer)["message"]
        for path in (COMPLETIONS, CHAT):
            for count in (0, -1, 129, 10**30, "two"):
                await refused(http, path, "n", {"n": count})
            await refused(http, path, "logit_bias", {"logit_bias": {"320": 1}})
            await refused(http, path, "logit_bias", {"logit_bias": {"five": 1}})
            await refused(http, path, "stop", {"stop": [""]})
        await refused(http, MESSAGES, "stop_sequences", {"stop_sequences": ["x"] * 17})
        await refused(http, MESSAGES, "top_k", {"top_k": -2})
        told(COMPLETIONS, await http.post(COMPLETIONS, json={"prompt": ["a", "b", "c"], "n": 128}))


WRONG_MESSAGES: list[tuple[Any, str]] = [
    ([], ""),
    ({"role": "user"}, ""),
    ([5], "[0]"),
    ([{"content": "x"}], "[0].role"),
    ([{"role": "robot", "content": "x"}], "[0].role"),
    ([{"role": "user", "content": 5}], "[0].content"),
    ([{"role": "user", "content": [5]}], "[0].content[0]"),
    ([{"role": "user", "content": "x"}, {"role": "user", "content": {"text": "x"}}], "[1].content"),
]


async def test_wrong_messages_are_told_by_path(served: Any) -> None:
    async with still_well(served) as http:
        for path, field in CHATTING.items():
            for wrong, where in WRONG_MESSAGES:
                await refused(http, path, field + where, {field: wrong})
            for missing in (None, 5, True):
                await refused(http, path, field, {field: missing})
            image = {"type": "input_image" if path == RESPONSES else "image", "image_url": "data:"}
            answer = await http.post(
                path, json={**GOOD[path], field: [{"role": "user", "content": [image]}]}
            )
            assert f"{field}[0].content" in told(path, answer)["message"]


async def test_wrong_items_of_responses_are_told_by_path(served: Any) -> None:
    async with still_well(served) as http:
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        for field, body in [
            ("input[0]", {"input": [{"type": "web_search_call", "id": "x"}]}),
            ("input[0]", {"input": [{"type": ["message"]}]}),
            ("input[0].arguments", {"input": [{**call, "arguments": {"a": 1}}]}),
            ("input[0].call_id", {"input": [{**call, "call_id": ""}]}),
            (
                "input[0].output",
                {"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]},
            ),
            ("tools[0].type", {"tools": [{"type": "web_search"}]}),
            ("tools[0].name", {"tools": [{"type": "function"}]}),
            (
                "tools[0].parameters",
                {"tools": [{"type": "function", "name": "f", "parameters": []}]},
            ),
            ("tool_choice", {"tool_choice": "often"}),
            ("tool_choice", {"tool_choice": "required"}),
            ("text.format.type", {"text": {"format": {"type": "xml"}}}),
            ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
            ("metadata.k", {"metadata": {"k": 1}}),
            ("background", {"background": True}),
            ("conversation", {"conversation": "conv_1"}),
        ]:
            await refused(http, RESPONSES, field, body)
        for known in (RESPONSES + "/resp_x", RESPONSES + "/%00"):
            assert told(known, await http.get(known), 404)["type"] == "not_found_error"
            told(known, await http.delete(known), 404)
        answer = await http.post(RESPONSES, json={"input": "Hi", "previous_response_id": "resp_x"})
        assert told(RESPONSES, answer, 404)["param"] == "previous_response_id"


async def test_wrong_blocks_of_anthropic_are_told_by_path(served: Any) -> None:
    async with still_well(served) as http:
        use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
        first = "messages[0].content[0]"

        def said(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
            return {"messages": [{"role": role, "content": list(blocks)}, *HI]}

        for field, body in [
            (f"{first}.type", said("user", use)),
            (f"{first}.type", said("assistant", result)),
            (f"{first}.tool_use_id", said("user", {"type": "tool_result"})),
            (f"{first}.content[0]", said("user", {**result, "content": [{"type": "image"}]})),
            (f"{first}.input", said("assistant", {"type": "tool_use", "id": "t", "name": "f"})),
            (f"{first}.text", said("user", {"type": "text", "text": None})),
            ("messages[1].content", {"messages": [*HI, {"role": "assistant", "content": [use]}]}),
            (f"{first}.type", said("system", use)),
            (
                "messages[1].content",
                {
                    "messages": [*HI, {"role": "assistant", "content": "x"}],
                    "tools": [{"name": "f", "input_schema": {}}],
                    "tool_choice": {"type": "any"},
                },
            ),
            ("messages: ", {"messages": [{"role": "assistant", "content": "alone"}]}),
            ("system[0]", {"system": [{"type": "image"}]}),
            ("tools[0].input_schema", {"tools": [{"name": "f"}]}),
            (
                "tools[0].type",
                {"tools": [{"type": "web_search_20250305", "name": "w", "input_schema": {}}]},
            ),
            ("tool_choice.name", {"tool_choice": {"type": "tool"}}),
            ("tool_choice.type", {"tool_choice": {"type": "often"}}),
            ("tool_choice ", {"tool_choice": {"type": "any"}}),
        ]:
            await refused(http, MESSAGES, field, body)
        error = told(MESSAGES, await http.post(MESSAGES, json={"messages": HI}))
        assert error["message"].startswith("max_tokens: Field required")


async def test_json_inside_the_body_may_be_hostile(served: Any) -> None:
    deep = "[" * 50_000
    async with still_well(served) as http:
        call = {"id": "c", "function": {"name": "f", "arguments": deep}}
        history = [*HI, {"role": "assistant", "tool_calls": [call]}, *HI]
        for arguments in (deep, "{", '"\\ud800"', "1" * 5000, "NaN"):
            call["function"] = {"name": "f", "arguments": arguments}
            answer = await http.post(CHAT, json={"messages": history})
            assert answer.status_code in (200, 400), (arguments[:20], answer.text)
            item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
            answer = await http.post(RESPONSES, json={"input": [*HI, item, *HI]})
            assert answer.status_code in (200, 400), (arguments[:20], answer.text)
        nested: Any = {}
        for _ in range(100):
            nested = {"x": nested}
        for number in ("NaN", "1e999", json.dumps(nested)):
            flat = f'"type": "function", "name": "f", "parameters": {{"a": {number}}}'
            for path, tool in {
                RESPONSES: flat,
                CHAT: f'"type": "function", "function": {{{flat}}}',
                MESSAGES: f'"name": "f", "input_schema": {{"a": {number}}}',
            }.items():
                body = f'{json.dumps(GOOD[path])[:-1]}, "tools": [{{{tool}}}]}}'
                assert (
                    "tools[0]"
                    in told(path, await http.post(path, content=body.encode(), headers=JSON))[
                        "message"
                    ]
                )


async def test_unknown_fields_are_refused_by_name_and_harmless_ones_are_told(served: Any) -> None:
    http = served.http
    for path in SPEAKING:
        body = {**GOOD[path], "no_such_field": {"x": [1]}}
        error = told(path, await http.post(path, json=body))
        assert error["message"].startswith("no_such_field: is not served; seen: {'x': [1]}")
        assert error.get("code", "unknown_parameter") == "unknown_parameter"
        answer = await http.post(path, json={**GOOD[path], "metadata": {"user_id": "me"}})
        assert answer.status_code == 200, (path, answer.text)
        if path != RESPONSES:  # Responses keeps and returns metadata
            assert answer.headers["x-paceline-ignored"] == "metadata"
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part]}
    body = {"max_tokens": 3, "messages": [message]}
    answer = await http.post(MESSAGES, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-paceline-ignored"] == "messages[].content[].cache_control"
    error = told(
        MESSAGES, await http.post(MESSAGES, json={**body, "messages": [{**message, "x": 1}]})
    )
    assert error["message"].startswith("messages[0].x: ")
    opened = await http.post("/v1/sessions", json={"user": "me"})
    assert (opened.status_code, opened.json()["error"]["param"]) == (400, "user")
    assert (await http.post("/v1/sessions", json={"user": None})).status_code == 201


async def test_names_of_unknown_fields_are_shown_in_part(served: Any) -> None:
    for name in ("x" * 5000, "a\r\nset-cookie: x", "\u2028"):
        answer = await served.http.post(CHAT, json={**GOOD[CHAT], name: "y" * 5000})
        assert answer.status_code == 400
        assert len(answer.json()["error"]["message"]) < 400
        assert "x-paceline-ignored" not in answer.headers


async def test_null_counts_as_left_out(served: Any) -> None:
    open_ = (
        "temperature",
        "top_p",
        "stream",
        "stop",
        "seed",
        "tools",
        "tool_choice",
        "metadata",
        "n",
    )
    for path in SPEAKING:
        answer = await served.http.post(path, json={**GOOD[path], **dict.fromkeys(open_)})
        assert answer.status_code == 200, (path, answer.text)


async def test_paths_and_methods_that_are_not_served_answer_in_shape(served: Any) -> None:
    for path in ("/v1/nothing", "/v1/messages/batches"):
        assert told(path, await served.http.get(path), 404)["type"] == "not_found_error"
    for path in SPEAKING:
        told(path, await served.http.get(path), 405)
        told(path, await served.http.put(path, json={}), 405)


async def test_keys_open_their_own_session_only(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    http = served.http
    token = {"authorization": "Bearer secret"}
    one, other = [(await http.post(SESSIONS, json={}, headers=token)).json() for _ in range(2)]
    key = {"authorization": f"Bearer {one['api_key']}"}
    for path, good in GOOD.items():
        for wrong in (
            {},
            {"authorization": "Bearer sk-pl-x"},
            {"authorization": "Basic secret"},
            {"x-api-key": "é"},
        ):
            headers = {name: value.encode() for name, value in wrong.items()}
            told(path, await http.post(path, json=good, headers=headers), 401)
    told(SESSIONS, await http.post(SESSIONS, json={}, headers=key), 403)
    for path, method in {
        "": "GET",
        "/export": "GET",
        "/reward": "POST",
        "/complete": "POST",
        "/abort": "POST",
    }.items():
        theirs = f"{SESSIONS}/{other['id']}{path}"
        told(theirs, await http.request(method, theirs, headers=key, json={"value": 1}), 403)
        unknown = f"{SESSIONS}/nobody{path}"
        told(unknown, await http.request(method, unknown, headers=token, json={"value": 1}), 404)
        current = f"{SESSIONS}/current{path}"
        told(current, await http.request(method, current, headers=token, json={"value": 1}), 400)
    assert (
        await http.post(MESSAGES, json=GOOD[MESSAGES], headers={"x-api-key": one["api_key"]})
    ).status_code == 200
    assert (await http.post(f"{SESSIONS}/current/complete", headers=key)).status_code == 200
    for path in SPEAKING:
        error = told(path, await http.post(path, json=GOOD[path], headers=key), 409)
        assert "unscored" in error["message"]
    told(
        SESSIONS,
        await http.post(f"{SESSIONS}/{one['id']}/reward", json={"value": 1}, headers=token),
        409,
    )
