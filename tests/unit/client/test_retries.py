"""What is tried again, and for how long, over real connections to a server that misbehaves."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import pytest
from unit.client.conftest import Connect
from unit.client.scripted_gateway import (
    SESSION,
    ScriptedGateway,
    close,
    close_within,
    drip,
    listening,
    refuse,
    reply,
    serving,
)

from paceline.client import Backoff
from paceline.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    PacelineError,
    ResourceExhausted,
    Unavailable,
)
from paceline.local.patience import patient

COMPLETION = {
    "id": "cmpl-1",
    "choices": [
        {
            "text": "ab",
            "token_ids": [4, 5],
            "logprobs": {"token_logprobs": [-0.5, -1]},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}
BUSY = refuse(503, "no worker serves", "unavailable")


async def test_what_is_refused_with_503_or_429_is_asked_again(
    gateway: ScriptedGateway, client: Any
) -> None:
    full = refuse(
        429, "the queue is full", "resource_exhausted", "rate_limit_error", retry_after="0"
    )
    session = await client.session()
    for step, again in ((BUSY, 2), (full, 3)):
        gateway.then(*[step] * again, reply(200, COMPLETION))
        tokens = await session.generate([1, 2, 3])
        assert (tokens.token_ids, tokens.logprobs, tokens.text) == ((4, 5), (-0.5, -1.0), "ab")
    assert gateway.paths() == ["POST /v1/sessions"] + ["POST /v1/completions"] * 7


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


async def test_a_generation_whose_answer_was_lost_is_not_asked_again(
    gateway: ScriptedGateway, client: Any
) -> None:
    session = await client.session()
    for step in (close, close_within(b'{"id": '), reply(502, b"<html>"), reply(504, b"")):
        asked = len(gateway.seen)
        gateway.then(step)
        with pytest.raises((Unavailable, DeadlineExceeded)) as caught:
            await session.generate([1], max_tokens=4)
        assert len(gateway.seen) == asked + 1
        assert "POST /v1/completions" in caught.value.__notes__[0]


async def test_other_calls_whose_answer_was_lost_are_asked_again(
    gateway: ScriptedGateway, client: Any
) -> None:
    for step in (close, close_within(b'{"id": '), reply(502, b"<html>"), reply(504, b"")):
        asked = len(gateway.seen)
        gateway.then(step)
        assert (await client.session_info("s1")).state == "open"
        assert len(gateway.seen) == asked + 2
    gateway.then(close)
    assert (await client.session()).id == "s1"


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
    gateway = ScriptedGateway(otherwise=reply(200, {"status": "ok"}))
    never_again = Backoff(60.0, 60.0)  # the first refusal leaves no time for another attempt
    with pytest.raises(Unavailable) as caught:
        await connect(f"http://127.0.0.1:{port}", backoff=never_again).health()
    assert caught.value.reason == "NO_CONNECTION"
    with ExitStack() as servers:

        def serve_after_the_first_attempt() -> float:
            if not gateway.root:
                servers.enter_context(serving(gateway, listening(port)))
            return 1.0

        client = connect(
            f"http://127.0.0.1:{port}", backoff=Backoff(0.01, 0.01, serve_after_the_first_attempt)
        )
        assert await client.health() == {"status": "ok"}
        assert len(gateway.seen) == 1


@pytest.mark.parametrize("step", ["hang", "hang in the body", "drip"])
async def test_no_call_outlasts_its_deadline(
    gateway: ScriptedGateway, connect: Connect, step: str
) -> None:
    client = connect(gateway.base_url, deadline_s=0.4)
    gateway.then(
        {"hang": gateway.hang(), "hang in the body": gateway.hang(b"{"), "drip": drip}[step]
    )
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"0\.4 s"):
        await client.session_info("s1")
    assert 0.4 <= time.monotonic() - began < patient(2)
    # Not asked again; a busy machine may have ended the wait before the server read it at all.
    assert len(gateway.seen) <= 1


async def test_a_generations_deadline_is_its_own_or_the_calls(
    gateway: ScriptedGateway, connect: Connect
) -> None:
    client = connect(gateway.base_url, generation_deadline_s=0.2)
    session = await client.session()
    gateway.then(gateway.hang(), gateway.hang())
    with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
        await session.chat([{"role": "user", "content": "hello"}])
    with pytest.raises(DeadlineExceeded, match=r"0\.1 s"):
        await session.generate("hello", deadline_s=0.1)
    assert "deadline_s" not in gateway.seen[-1].body


async def test_a_wait_that_ends_after_the_deadline_is_not_begun(
    gateway: ScriptedGateway, connect: Connect
) -> None:
    client = connect(gateway.base_url, deadline_s=100)
    full = ("the queue is full", "resource_exhausted", "rate_limit_error")
    gateway.then(refuse(429, *full, retry_after="1000"))
    began = time.monotonic()
    with pytest.raises(ResourceExhausted, match="the queue is full"):
        await client.session()
    assert time.monotonic() - began < 50
    assert len(gateway.seen) == 1


async def test_refusals_that_do_not_end_are_told_as_they_are(
    gateway: ScriptedGateway, connect: Connect
) -> None:
    # Each attempt takes 1500 s by this clock, however long the machine takes for it.
    backoff = Backoff(0.01, 0.01, lambda: 1.0, clock=lambda: 1500.0 * len(gateway.seen))
    client = connect(gateway.base_url, deadline_s=5000, backoff=backoff)
    gateway.otherwise = BUSY
    with pytest.raises(Unavailable) as caught:
        await client.models()
    assert "no worker serves" in "".join([str(caught.value), *caught.value.__notes__])
    assert len(gateway.seen) == 4


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
        await client.models()
    assert len(gateway.seen) == 1
