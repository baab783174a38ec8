"""Sessions: how they begin, the requests they send, and how leaving their block ends them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import httpx2
import openai
import pytest
from unit.client.conftest import Connect
from unit.client.in_thread import in_either
from unit.client.scripted_gateway import (
    SESSION,
    ScriptedGateway,
    Seen,
    close,
    listening,
    refuse,
    reply,
    serving,
)

from paceline.client import AsyncClient
from paceline.errors import DeadlineExceeded, FailedPrecondition, InvalidInput, Unavailable
from paceline.local.patience import patient

ENDED = refuse(
    409,
    "session s1 has ended; seen: final",
    "session_ended",
    "invalid_request_error",
    x_should_retry="false",
)
HELLO: Any = [{"role": "user", "content": "hello"}]


def last(gateway: ScriptedGateway) -> Seen:
    return gateway.seen[-1]


async def test_a_session_is_opened_with_what_is_given_under_the_gateways_token(
    gateway: ScriptedGateway, client: Any
) -> None:
    session = await client.session(
        task="t", group="g", group_size=8, sample_index=0, trainable=False, timeout_s=9
    )
    assert (session.id, session.group_id, session.task, session.ended) == ("s1", "g1", None, False)
    expected = {
        "task_id": "t",
        "group_id": "g",
        "group_size": 8,
        "sample_index": 0,
        "trainable": False,
        "timeout_s": 9,
    }
    assert last(gateway).body == expected
    assert last(gateway).headers["authorization"] == "Bearer gateway-token"
    await client.session()
    assert last(gateway).body == {}


async def test_calls_of_a_session_carry_its_key(gateway: ScriptedGateway, client: Any) -> None:
    session = await client.session()
    options = session.openai_options()
    assert options == {
        "api_key": "key-of-s1",
        "base_url": f"{gateway.base_url}/v1",
        "default_headers": {},
    }
    await in_either(session, lambda model: model.models.list())
    assert (session.api_key, session.base_url) == (options["api_key"], options["base_url"])
    await session.info()
    await session.reward(True, completion="chatcmpl-7", accumulate=True)
    reward = dict(last(gateway).body)
    assert len(reward.pop("idempotency_key")) >= 16
    assert reward == {"value": 1.0, "completion_id": "chatcmpl-7", "accumulate": True}
    await session.reward(0.5, parts={"form": 0.25})
    assert last(gateway).body["parts"] == {"form": 0.25}
    await client.attach("key-of-s1").info()
    assert [one.headers["authorization"] for one in gateway.seen[1:]] == ["Bearer key-of-s1"] * 5
    assert gateway.paths()[1:] == [
        "GET /v1/models",
        "GET /v1/sessions/s1",
        "POST /v1/sessions/s1/reward",
        "POST /v1/sessions/s1/reward",
        "GET /v1/sessions/current",
    ]


async def test_leaving_the_block_completes_without_a_reward(
    gateway: ScriptedGateway, client: Any
) -> None:
    async with await client.session() as session:
        pass
    assert session.ended
    assert (gateway.paths()[-1], last(gateway).body) == ("POST /v1/sessions/s1/complete", {})
    session = await client.session()
    async with session:
        assert (await session.complete(reward=0.5)).state == "open"
    assert last(gateway).body == {"reward": 0.5}
    assert gateway.paths().count("POST /v1/sessions/s1/complete") == 2


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "path", "body"),
    [
        (
            ValueError("no number"),
            "fail",
            {"reason": "data", "message": "ValueError: no number"},
        ),
        (Unavailable("the tool server is away"), "fail", {"reason": "infra"}),
        (ConnectionResetError(), "fail", {"reason": "infra"}),
        (
            caused(RuntimeError(), ValueError("no tool")),
            "fail",
            {"reason": "data", "message": "RuntimeError, caused by ValueError: no tool"},
        ),
        (httpx.ReadError("reset"), "fail", {"reason": "infra"}),
        (
            openai.APITimeoutError(httpx2.Request("GET", "http://h")),
            "fail",
            {"reason": "infra"},
        ),
        (ExceptionGroup("two", [ValueError(), TimeoutError()]), "fail", {"reason": "infra"}),
        (
            RuntimeError("x" * 9999),
            "fail",
            {"reason": "data", "message": ("RuntimeError: " + "x" * 9999)[:500]},
        ),
        (KeyboardInterrupt(), "abort", {}),
        (SystemExit(3), "abort", {}),
        (asyncio.CancelledError(), "abort", {}),
    ],
)
async def test_an_exception_ends_the_session_and_goes_on(
    gateway: ScriptedGateway, client: Any, error: BaseException, path: str, body: dict[str, str]
) -> None:
    with pytest.raises(type(error)) as caught:
        async with await client.session():
            raise error
    assert caught.value is error
    assert gateway.paths()[1:] == [f"POST /v1/sessions/s1/{path}"]
    assert last(gateway).body.items() >= body.items()


async def test_cancelling_a_task_inside_the_block_aborts_the_session(
    gateway: ScriptedGateway,
) -> None:
    async with AsyncClient(gateway.base_url, "") as client:
        inside = asyncio.Event()

        async def lead() -> None:
            async with await client.session():
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(lead())
        await asyncio.wait_for(inside.wait(), patient(10))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert gateway.paths() == ["POST /v1/sessions", "POST /v1/sessions/s1/abort"]


async def test_an_error_raised_from_a_lost_connection_is_infra(
    gateway: ScriptedGateway, client: Any
) -> None:
    with pytest.raises(RuntimeError):
        async with await client.session():
            raise RuntimeError("the agent's client gave up") from httpx.ConnectError("refused")
    assert last(gateway).body["reason"] == "infra"


async def test_a_session_that_has_ended_is_not_ended_again(
    gateway: ScriptedGateway, client: Any
) -> None:
    async with await client.session() as session:
        await session.abort()
    session = await client.session()
    await session.fail("data", "no such file")
    with pytest.raises(ValueError, match="later"):
        async with session:
            raise ValueError("later")
    gateway.then(reply(201, SESSION), ENDED, reply(201, SESSION), ENDED)
    with pytest.raises(FailedPrecondition, match="has ended"):
        async with await client.session() as session:
            await session.reward(1)
    with pytest.raises(openai.ConflictError, match="has ended"):
        async with await client.session() as session:
            await in_either(
                session, lambda model: model.chat.completions.create(model="", messages=HELLO)
            )
    assert [path.rsplit("/", 1)[1] for path in gateway.paths()] == [
        *("sessions", "abort", "sessions", "fail", "sessions", "reward", "sessions", "completions")
    ]


async def test_an_end_whose_answer_was_lost_is_sent_again(
    gateway: ScriptedGateway, client: Any
) -> None:
    for name, arguments in (("complete", ()), ("abort", ()), ("fail", ("data",))):
        session = await client.session()
        gateway.then(close, reply(200, {**SESSION, "state": "failed"}))
        before = len(gateway.seen)
        assert (await getattr(session, name)(*arguments)).state == "failed"
        assert (session.ended, len(gateway.seen)) == (True, before + 2)
    session = await client.session()
    gateway.then(ENDED)
    with pytest.raises(FailedPrecondition):
        await session.complete()
    assert not session.ended


async def test_what_left_the_block_is_not_hidden_by_a_gateway_that_is_away(
    connect: Connect,
) -> None:
    gateway = ScriptedGateway()
    with serving(gateway, listening()):
        session = await connect(gateway.base_url).session()
    with pytest.raises(ValueError, match="mine") as caught:
        async with session:
            raise ValueError("mine")
    assert "session s1 could not be ended and will time out" in caught.value.__notes__[0]


async def test_tasks_are_claimed_until_none_comes(gateway: ScriptedGateway, client: Any) -> None:
    task = {"id": "t1", "prompt": "1+1=", "metadata": {"level": "easy"}}
    gateway.then(reply(201, {**SESSION, "task": task}), reply(200, {**SESSION, "state": "final"}))
    gateway.otherwise = reply(204, None)
    done = []
    async for session in client.tasks(timeout_s=0.3, session_timeout_s=60):
        async with session:
            done.append(session.task)
    (one,) = done
    assert (one.id, one.prompt, one.metadata) == ("t1", "1+1=", {"level": "easy"})
    assert gateway.paths()[:2] == ["POST /v1/sessions", "POST /v1/sessions/s1/complete"]
    asked = gateway.seen[0].body
    assert asked == {"claim": True, "wait_s": asked["wait_s"], "timeout_s": 60}
    assert 0 < asked["wait_s"] <= 0.3
    assert len(gateway.seen) <= 4  # a claim that is answered at once is not repeated at once
    assert await client.claim(0.01) is None


async def test_the_end_of_a_run_ends_its_tasks_and_a_gateway_that_never_was_is_an_error(
    connect: Connect,
) -> None:
    gateway = ScriptedGateway()
    task = {"id": "t1", "prompt": "1+1=", "metadata": {}}
    gateway.then(reply(201, {**SESSION, "task": task}))
    with serving(gateway, listening()):
        client = connect(gateway.base_url)
        tasks = aiter(client.tasks(timeout_s=1.5))
        assert (await anext(tasks)).task.id == "t1"
    assert [one async for one in tasks] == []
    with pytest.raises((Unavailable, DeadlineExceeded), match="the gateway"):
        await anext(aiter(connect(gateway.base_url).tasks(timeout_s=1.5)))


async def test_a_refused_claim_says_why(gateway: ScriptedGateway, client: Any) -> None:
    gateway.then(
        refuse(409, "no run uses this gateway", "no_tasks_offered", x_should_retry="false")
    )
    with pytest.raises(FailedPrecondition, match="no run uses") as caught:
        await anext(aiter(client.tasks(timeout_s=5)))
    assert caught.value.reason == "NO_TASKS_OFFERED"


async def test_exports_and_rewards_by_completion(gateway: ScriptedGateway, client: Any) -> None:
    sample = {
        "token_ids": [1, 2],
        "loss_mask": [0, 1],
        "behavior_logprobs": [0, -0.5],
        "version_spans": [],
        "reward": None,
    }
    session = await client.session()
    gateway.then(
        reply(200, {"object": "session.tree", "turns": []}), reply(200, {"samples": [sample]})
    )
    assert (await session.tree())["turns"] == []
    (read,) = await session.samples()
    assert (read.token_ids, read.loss_mask, read.behavior_logprobs, read.reward) == (
        (1, 2),
        (0, 1),
        (0, -0.5),
        None,
    )
    await client.reward("chatcmpl-7", 0.25)
    assert gateway.paths()[1:] == [
        "GET /v1/sessions/s1/export?form=tree",
        "GET /v1/sessions/s1/export?form=samples",
        "POST /v1/rewards",
    ]


async def test_a_reward_that_is_no_finite_number_is_refused_before_anything_is_sent(
    gateway: ScriptedGateway, client: Any
) -> None:
    session = await client.session()
    for value in (float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="finite number"):
            await session.reward(value)
    assert len(gateway.seen) == 1


async def test_threads_or_tasks_share_one_client(gateway: ScriptedGateway, client: Any) -> None:
    async def one(index: int) -> None:
        async with await client.session(sample_index=index):
            pass

    await asyncio.gather(*(one(index) for index in range(32)))
    opened = [one.body["sample_index"] for one in gateway.seen if one.path == "/v1/sessions"]
    assert sorted(opened) == list(range(32))
    assert len(gateway.seen) == 64
