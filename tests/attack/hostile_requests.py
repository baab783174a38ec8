"""Some twenty requests that try to block the gateway. Each attack is a function of the gateway's
two ports; it sends one request and returns at its end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import httpx

from paceline.config import SecurityConfig
from paceline.rpc import channel
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub

MB = 1 << 20
DEADLINE_S = 60.0
COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
RESPONSES, COUNT = "/v1/responses", "/v1/messages/count_tokens"
Attack = Callable[[int, int], Awaitable[object]]
"""(HTTP port, gRPC port) -> outcome of the attack"""


def posted(path: str, body: object) -> Attack:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def send(http_port: int, _: int) -> object:
        url = f"http://127.0.0.1:{http_port}{path}"
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
            headers = {"content-type": "application/json"}
            return (await client.post(url, content=raw, headers=headers)).status_code

    return send


def endless(path: str, seconds: float) -> Attack:
    """Sends a body without an end, as fast as the gateway reads it."""

    async def parts() -> AsyncIterator[bytes]:
        async with asyncio.timeout(seconds):
            yield b'{"model": "'
            while True:
                yield b"x" * 65_536
                await asyncio.sleep(0)

    async def send(http_port: int, _: int) -> object:
        headers = {"content-type": "application/json"}
        with suppress(TimeoutError, httpx.TransportError):
            async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
                url = f"http://127.0.0.1:{http_port}{path}"
                return (await client.post(url, content=parts(), headers=headers)).status_code
        return "cut off"

    return send


def raw_bytes(*parts: bytes, times: int = 1) -> Attack:
    """Sends bytes on a connection until the gateway closes it or all bytes are sent."""

    async def send(http_port: int, _: int) -> object:
        reader, writer = await asyncio.open_connection("127.0.0.1", http_port)
        with suppress(ConnectionError):
            for part in (*parts[:1], *(parts[1:] * times)):
                writer.write(part)
                await writer.drain()
            writer.write_eof()
            async with asyncio.timeout(DEADLINE_S):
                return (await reader.read(100)).partition(b"\r\n")[0]
        writer.close()
        return "cut off"

    return send


def generated(request: rpb.GenerateRequest) -> Attack:
    async def send(_: int, grpc_port: int) -> object:
        async with channel(f"127.0.0.1:{grpc_port}", SecurityConfig()) as to:
            call: Any = RolloutServiceStub(to).Generate(request, timeout=DEADLINE_S)
            with suppress(grpc.aio.AioRpcError):
                async for _ in call:
                    pass
            return (await call.code()).name

    return send


def chat(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4, **fields}


def function(index: int) -> dict[str, object]:
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    about = {"name": f"f{index}", "description": "d", "parameters": parameters}
    return {"type": "function", "function": about}


def say(content: str) -> dict[str, object]:
    return {"role": "user", "content": content}


def called(arguments: str) -> dict[str, object]:
    call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


HARD_SCHEMA = {"allOf": [{"pattern": f"^(a|b{i})*{i}+$"} for i in range(300)], "multipleOf": 1e-9}
HARD_REGEX = "(((a|b?c)*[a-z]{0,900}){0,900}d){0,900}" * 200
HARD_GRAMMAR = "start: a*\na: b | c\nb: %json " + json.dumps(
    {"type": "integer", "multipleOf": 99999971}
)
HARD_GRAMMAR += "\nc: " + " | ".join(f'"{i}" a a' for i in range(2000))
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
HOSTILE: dict[str, Attack] = {
    "a prompt of 6 MB": posted(COMPLETIONS, {"prompt": "a" * 6 * MB}),
    "a prompt of 1 MB": posted(COMPLETIONS, {"prompt": "a" * (MB - 1000)}),
    "a message of 1 MB": posted(CHAT, chat(messages=[say("a b " * (MB // 4 - 1000))])),
    "100,000 messages": posted(CHAT, chat(messages=[say("hi")] * 100_000)),
    "4,000 messages": posted(RESPONSES, {"input": [say("hi")] * 4000}),
    "4,000 messages to count": posted(COUNT, chat(messages=[say("hi")] * 4000)),
    "30,000 wrong numbers": posted(COMPLETIONS, {"prompt": [1.5] * 30_000}),
    "30,000 prompts": posted(COMPLETIONS, {"prompt": [""] * 30_000}),
    "256 prompts of 4 kB": posted(COMPLETIONS, {"prompt": ["1 2 " * 990] * 256}),
    "10,000 tools": posted(CHAT, chat(tools=[function(one) for one in range(10_000)])),
    "30,000 biased tokens": posted(CHAT, chat(logit_bias={str(i): 1 for i in range(30_000)})),
    "a million objects inside": posted(CHAT, b'{"messages":' + b'[{"a":' * MB),
    "a number of 1 MB": posted(CHAT, b'{"messages":[],"seed":' + b"9" * 1_000_000 + b"}"),
    "stops of 500 kB": posted(COMPLETIONS, {"prompt": "1", "stop": ["x" * (MB // 2 - 1000)] * 2}),
    "8 choices of a hard schema": posted(
        CHAT,
        chat(n=8, response_format={"type": "json_schema", "json_schema": {"schema": HARD_SCHEMA}}),
    ),
    "8 choices of a hard regex": posted(CHAT, chat(n=8, structured_outputs={"regex": HARD_REGEX})),
    "8 choices of a hard grammar": posted(
        COMPLETIONS, {"prompt": "1", "n": 8, "structured_outputs": {"grammar": HARD_GRAMMAR}}
    ),
    "1,000 strict tools": posted(
        CHAT, chat(tools=[function(one) for one in range(1000)], tool_choice="required")
    ),
    "arguments of 250 kB": posted(CHAT, chat(messages=[called("[" + "1," * 125_000 + "1]")])),
    "an endless body": endless(RESPONSES, 5.0),
    "an endless header": raw_bytes(HEAD + b"x: ", b"y" * 65_536, times=500),
    "a million headers": raw_bytes(HEAD, b"a:b\r\n" * 10_000, times=100),
    "8 million token ids by gRPC": generated(
        rpb.GenerateRequest(token_ids=rpb.TokenIds(ids=[1] * (8 * MB - 100)))
    ),
}
