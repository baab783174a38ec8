"""Which calls are repeated, over real connections to a server that misbehaves."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest
from unit.client.conftest import Connect
from unit.client.in_thread import in_either
from unit.client.scripted_gateway import (
    SESSION,
    ScriptedGateway,
    close,
    close_within,
    listening,
    refuse,
    reply,
    serving,
)

from paceline.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    PacelineError,
    Unavailable,
)
from paceline.local.patience import patient

NOW = {"retry_after_ms": "10"}
BUSY = refuse(503, "no worker serves", "unavailable", **NOW)
FULL = refuse(429, "the queue is full", "resource_exhausted", "rate_limit_error", **NOW)
BROKEN = refuse(500, "the engine failed", "internal", x_should_retry="false")


async def test_what_is_refused_with_503_or_429_is_asked_again(
    gateway: ScriptedGateway, client: Any
) -> None:
    for step in (BUSY, FULL):
        gateway.then(step, step)
        assert (await client.session()).id == "s1"
    assert gateway.paths() == ["POST /v1/sessions"] * 6


async def test_a_call_that_another_gateway_must_answer_is_repeated_once_with_its_number(
    gateway: ScriptedGateway, client: Any
) -> None:
    other = refuse(421, "another gateway has it", "other_gateway", x_paceline_gateway="1")
    gateway.then(other)
    assert (await client.session()).id == "s1"
    assert [one.headers.get("x-paceline-gateway") for one in gateway.seen] == [None, "1"]
    gateway.then(other, other)
    with pytest.raises(FailedPrecondition):
        await client.session()
    assert len(gateway.seen) == 4


async def test_a_generation_that_has_begun_is_not_asked_again(
    gateway: ScriptedGateway, client: Any
) -> None:
    session = await client.session()
    gateway.then(BROKEN)
    with pytest.raises(openai.InternalServerError, match="the engine failed"):
        await in_either(session, generate)
    assert len(gateway.seen) == 2


def generate(model: Any) -> Any:
    return model.completions.create(model="", prompt="1")


async def test_a_generation_whose_answer_was_lost_is_not_asked_again(
    gateway: ScriptedGateway, client: Any
) -> None:
    """The turn of the lost answer is in the session; a second one would be trained too."""
    session = await client.session()
    for step in (close, close_within(b'{"id": ')):
        gateway.then(step)
        with pytest.raises(openai.APIConnectionError):
            await in_either(session, generate)
    gateway.then(gateway.hang())
    with pytest.raises(openai.APITimeoutError):
        await in_either(session, lambda model: generate(model.with_options(timeout=0.4)))
    gateway.then(reply(502, b"<html>", **NOW))
    with pytest.raises(openai.InternalServerError):
        await in_either(session, generate)
    assert gateway.paths()[1:] == ["POST /v1/completions"] * 4


async def test_a_generation_that_has_not_begun_is_asked_again(
    gateway: ScriptedGateway, client: Any
) -> None:
    session = await client.session()
    gateway.then(BUSY, FULL, reply(503, b"<html>", **NOW), reply(200, {"id": "c1"}))
    assert (await in_either(session, generate)).id == "c1"
    assert len(gateway.seen) == 5


async def test_a_generation_waits_for_a_server_that_is_not_there_yet(connect: Connect) -> None:
    with listening() as held:
        port = held.getsockname()[1]
    session = connect(f"http://127.0.0.1:{port}").attach("key-of-s1")
    asked = asyncio.create_task(in_either(session, generate))
    gateway = ScriptedGateway()
    gateway.then(reply(200, {"id": "c1"}))
    with serving(gateway, listening(port)):
        assert (await asked).id == "c1"


async def test_calls_whose_answer_was_lost_are_asked_again(
    gateway: ScriptedGateway, client: Any
) -> None:
    for step in (close, close_within(b'{"id": '), reply(502, b"<html>", **NOW)):
        asked = len(gateway.seen)
        gateway.then(step)
        assert (await client.session_info("s1")).state == "open"
        assert len(gateway.seen) == asked + 2


async def test_a_reward_has_one_idempotency_key_however_often_it_is_sent(
    gateway: ScriptedGateway, client: Any
) -> None:
    session = await client.session()
    gateway.then(close, BUSY, reply(200, SESSION), reply(200, SESSION))
    await session.reward(1.0)
    await session.reward(1.0)
    keys = [one.body["idempotency_key"] for one in gateway.seen[1:]]
    assert len(keys) == 4
    assert keys[0] == keys[1] == keys[2] != keys[3]


async def test_a_server_that_is_not_there_yet_is_waited_for(connect: Connect) -> None:
    with listening() as held:
        port = held.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(Unavailable, match="no answer from the gateway"):
        await connect(url, max_retries=0).session_info("s1")
    gateway = ScriptedGateway()
    gateway.then(reply(201, {**SESSION, "task": {"id": "t", "prompt": "1"}}))
    tasks = connect(url).tasks(timeout_s=patient(10))
    with serving(gateway, listening(port)):
        assert (await anext(aiter(tasks))).task.id == "t"


async def test_an_attempt_ends_at_its_timeout(gateway: ScriptedGateway, connect: Connect) -> None:
    client = connect(gateway.base_url, timeout_s=0.4, max_retries=0)
    for step in (gateway.hang(), gateway.hang(b"{")):
        gateway.then(step)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="in time"):
            await client.session_info("s1")
        assert 0.4 <= time.monotonic() - began < patient(2)


@pytest.mark.parametrize(
    "body", [b"<html>hello</html>", b"", b"[1]", b"\xff\xfe", {"id": 7, "state": "open"}, {}]
)
async def test_a_body_that_is_no_answer_is_data_loss(
    gateway: ScriptedGateway, client: Any, body: Any
) -> None:
    gateway.then(reply(200, body))
    with pytest.raises(DataLoss):
        await client.session_info("s1")
    assert len(gateway.seen) == 1


async def test_redirects_are_not_followed(gateway: ScriptedGateway, client: Any) -> None:
    gateway.then(reply(307, {}, location="http://127.0.0.1:1/elsewhere"))
    with pytest.raises(PacelineError, match="HTTP 307"):
        await client.session_info("s1")
    assert len(gateway.seen) == 1
