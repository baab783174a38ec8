"""The Python client, both kinds, against a real gateway over the scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, nullcontext
from typing import Any

import openai
import pytest
from unit.client.in_thread import InThread, in_either

from paceline.client import AsyncClient, Client
from paceline.errors import FailedPrecondition, InvalidInput, NotFound
from paceline.local.patience import patient
from paceline.v1 import rollout_pb2 as rpb

TOKEN = "the-gateways-token"
Connect = Callable[..., Any]


async def chat(owner: Any, *messages: Any, **options: Any) -> Any:
    body = {"model": "", "messages": list(messages), "max_tokens": 64, **options}
    return await in_either(owner, lambda model: model.chat.completions.create(**body))


async def generate(owner: Any, prompt: Any, **options: Any) -> Any:
    """One completion with its token ids and log-probs."""
    body = {"model": "", "prompt": prompt, "max_tokens": 64, "logprobs": 0, **options}
    body["extra_body"] = {"return_token_ids": True}
    return await in_either(owner, lambda model: model.completions.create(**body))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture(params=["sync", "async"])
async def connect(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Connect]:
    """`connect(served)`: a client of either kind with the token that the gateway requires."""
    monkeypatch.setenv("PACELINE_TOKEN", TOKEN)
    async with AsyncExitStack() as clients:

        def make(served: Any, **options: Any) -> Any:
            url = str(served.http.base_url)
            options = {"token": TOKEN, "timeout_s": 15.0, **options}
            client: Any = (
                InThread(Client(url, **options))
                if request.param == "sync"
                else AsyncClient(url, **options)
            )
            clients.push_async_callback(client.close)
            return client

        yield make


async def test_models_and_a_wrong_token(serve_gateway: Any, connect: Connect) -> None:
    async with serve_gateway() as served:
        listed = await in_either(connect(served), lambda model: model.models.list())
        assert [one.id for one in listed.data] == ["tiny-model"]
        with pytest.raises(InvalidInput) as caught:
            await connect(served, token="another").session()
        assert caught.value.reason == "UNAUTHENTICATED"


async def test_tokens_go_in_and_come_out_as_they_are(serve_gateway: Any, connect: Connect) -> None:
    async with serve_gateway() as served:
        caller = connect(served)
        answer = await generate(caller, list(served.codec.encode("1+1=")), seed=1)
        (choice,) = answer.choices
        assert choice.token_ids == [*served.codec.encode("1+1=3 #3")[1:], 1]
        scripted = [-(1 + token % 7) / 8 for token in choice.token_ids]
        assert choice.logprobs.token_logprobs == scripted
        assert (choice.text, choice.finish_reason, answer.usage.prompt_tokens) == (
            "1+1=3 #3",
            "stop",
            5,
        )
        assert (await generate(caller, "1+1=", seed=0)).choices[0].text == "1+1=2 #2"
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await generate(caller, "1+1=", max_tokens=-1)


async def test_leaving_a_stream_frees_the_engine(
    serve_gateway: Any, script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", TOKEN)
    script |= {"real_time": True, "default_cost_s": 0.01, "costs_s": {}, "arms": ["off"]}
    async with serve_gateway() as served, AsyncClient(str(served.http.base_url), TOKEN) as client:
        body: Any = {"model": "", "messages": [user("2+2=")], "max_tokens": 450, "stream": True}
        body["extra_body"] = {"ignore_eos": True}
        async with await client.openai.chat.completions.create(**body) as stream:
            async for _ in stream:
                break
        async with asyncio.timeout(patient(10)):
            while (
                (await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5)))
                .workers[0]
                .health.running
            ):
                pass


async def test_a_session_is_what_its_agent_said_and_earned(
    serve_gateway: Any, connect: Connect
) -> None:
    async with serve_gateway() as served:
        client = connect(served)
        async with await client.session(
            task="sums", group="g1", group_size=2, sample_index=1
        ) as session:
            with_ids = {"return_token_ids": True}
            first = await chat(session, user("2+2="), extra_body=with_ids)
            (said,) = first.choices
            second = await chat(session, user("2+2="), said.message, user("again"), max_tokens=8)
            await session.reward(0.5, completion=first.id)
            await session.reward(0.25, completion=second.id, accumulate=True)
            info = await session.info()
            assert (info.state, info.turns, info.reward, info.task_id) == ("open", 2, None, "sums")
            assert (info.group_id, info.group_size, info.sample_index) == ("g1", 2, 1)
            assert (
                info.completion_tokens
                == first.usage.completion_tokens + second.usage.completion_tokens
            )
            tree = (await session.tree())["tree"]
            assert [turn["completion_id"] for turn in tree] == [
                first.id,
                second.id,
            ]
            assert [turn["reward"] for turn in tree] == [0.5, 0.25]
            (sample,) = await session.samples()
            trained = [
                token
                for token, counts in zip(sample.token_ids, sample.loss_mask, strict=True)
                if counts
            ]
            assert trained[: len(said.token_ids)] == said.token_ids
            assert len(trained) == info.completion_tokens
            assert len(sample.behavior_logprobs) == len(sample.token_ids)
        assert (await client.session_info(session.id)).state == "final"
        assert (await session.tree())["tree"] == tree
        assert await session.samples() == (sample,)
        with pytest.raises(openai.ConflictError) as caught:
            await chat(session, user("2+2="))
        assert caught.value.code == "session_ended"


async def test_how_a_block_is_left_is_how_the_session_ends(
    serve_gateway: Any, connect: Connect
) -> None:
    async with serve_gateway() as served:
        client = connect(served)

        async def left_by(
            error: BaseException | None, reward: float | None = None
        ) -> tuple[str, str | None]:
            session = await client.session()
            with nullcontext() if error is None else pytest.raises(type(error)):
                async with session:
                    await generate(session, "1+1=", max_tokens=4)
                    if reward is not None:
                        await session.reward(reward)
                    if error is not None:
                        raise error
            info = await client.session_info(session.id)
            return info.state, info.fail_reason

        assert await left_by(None) == ("unscored", None)
        assert await left_by(None, reward=0.0) == ("final", None)
        assert await left_by(ValueError("the agent's own"), reward=1.0) == ("failed", "data")
        assert await left_by(ConnectionError("a tool is away")) == ("failed", "infra")
        assert await left_by(KeyboardInterrupt()) == ("aborted", None)


async def test_an_openai_client_and_another_process_go_on_with_a_session(
    serve_gateway: Any, connect: Connect
) -> None:
    async with serve_gateway() as served:
        client = connect(served)
        session = await client.session()
        async with openai.AsyncOpenAI(**session.openai_options(), max_retries=0) as agent:
            messages: Any = [user("2+2=")]
            answer = await agent.chat.completions.create(
                model="tiny-model", messages=messages, max_tokens=64
            )
        assert answer.choices[0].message.content == "2+2=5 #5"
        elsewhere = connect(served, token="").attach(session.api_key)
        info = await elsewhere.info()
        assert (info.id, info.turns) == (session.id, 1)
        assert (await client.reward(answer.id, 1.0)).id == session.id
        assert (await elsewhere.complete()).state == "final"
        assert (await session.complete()).state == "final"


async def test_a_sessions_key_acts_on_no_other_session(
    serve_gateway: Any, connect: Connect
) -> None:
    async with serve_gateway() as served:
        one, other = await connect(served).session(), await connect(served).session()
        stranger = connect(served, token=one.api_key)
        for refused in (stranger.session_info(other.id), stranger.session(), stranger.claim(0.01)):
            with pytest.raises(InvalidInput) as caught:
                await refused
            assert caught.value.reason == "NOT_ALLOWED"
        with pytest.raises(NotFound):
            await connect(served).session_info("no-such-session")
        with pytest.raises(openai.AuthenticationError):
            await generate(connect(served).attach("sk-pl-nobody"), "1")
        with pytest.raises(openai.BadRequestError) as untrainable:
            await generate(one, "1+1=", top_p=0.5)
        assert untrainable.value.code == "not_trainable"
        with pytest.raises(FailedPrecondition, match="another reward") as conflict:
            await give_two_rewards(one)
        assert conflict.value.reason == "REWARD_CONFLICT"


async def give_two_rewards(session: Any) -> None:
    await session.reward(1.0)
    await session.reward(1.0)  # a repeated call changes nothing
    await session.reward(0.5)


async def test_tasks_of_a_run_are_claimed_led_and_counted(
    serve_gateway: Any, connect: Connect, redis_url: str, run_id: str
) -> None:
    keys = {"trajectories": True, "redis": {"durable_url": redis_url}, "run": {"id": run_id}}
    async with serve_gateway(**keys) as served:
        request = served.tasks_request(environment="external", reward="agent")
        told: list[Any] = []

        async def run() -> None:
            async for event in served.stub.RunTasks(request, timeout=patient(60)):
                told.append(event)

        running = asyncio.create_task(run())
        prompts = []
        async for session in connect(served).tasks(timeout_s=30):
            async with session:
                prompts.append(session.task.prompt)
                await generate(session, session.task.prompt)
                await session.reward(1.0)
            if len(prompts) == 4:
                break
        await asyncio.wait_for(running, patient(20))
        assert sorted(prompts) == ["1+1=", "1+1=", "2+2=", "2+2="]
        samples = [event.sample for event in told if event.WhichOneof("event") == "sample"]
        assert [sample.reward.value for sample in samples] == [1.0] * 4
