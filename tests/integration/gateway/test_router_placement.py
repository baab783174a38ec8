"""Sticky turns, lent slots and idleness over real worker processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.local.news import VARIABLE as NEWS_VARIABLE
from paceline.local.news import heard, news_pipe
from paceline.local.patience import patient
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb
from rollout_gateway.config import GatewayConfig, engine_settings
from rollout_gateway.workers.router import Router

POLICY = Path(__file__).parents[3] / "examples" / "demo" / "policy_start"
DEADLINE_S = patient(30)
Serve = Callable[..., AbstractAsyncContextManager[Router]]


def request(number: int, prompt: list[int], max_tokens: int = 4) -> pb.EngineRequest:
    sampling = tpb.SamplingParams(
        temperature=1.0, max_tokens=max_tokens, seed=number, ignore_eos=True
    )
    return pb.EngineRequest(
        request_id=number, prompt_token_ids=prompt, sampling=sampling, stream=True
    )


@pytest.fixture
def serve_router() -> Serve:
    @asynccontextmanager
    async def serve(kind: str) -> AsyncIterator[Router]:
        engine = {"kind": kind, "workers": 2}
        config = GatewayConfig.model_validate({"model": str(POLICY), "engine": engine})
        router = Router(
            2, config.engine, engine_settings(config), None, lambda _: None, lambda _: None
        )
        await router.start()
        try:
            yield router
        finally:
            await router.stop()

    return serve


async def ended(router: Router, *arguments: Any, **options: Any) -> tuple[int, pb.TokenChunk]:
    """The worker that answered, and its answer."""
    generation = router.submit(*arguments, **options)
    async with asyncio.timeout(DEADLINE_S):
        async for _ in generation.chunks():
            pass
    answer = generation.whole
    assert answer.finish_reason == tpb.FINISH_REASON_LENGTH, answer.error
    return generation.worker_index, answer


async def test_the_next_turn_finds_its_conversation_in_the_cache(serve_router: Serve) -> None:
    async with serve_router("embedded") as router:
        first = [2, *(3 + n % 50 for n in range(99))]
        holder, answer = await ended(router, request(1, first), worker=1)
        second = [*first, *answer.token_ids, 5, 6, 7]
        stays, cached = await ended(router, request(2, second), prefer=holder)
        assert (stays, cached.cached_prompt_tokens >= len(first)) == (holder, True)
        strays, fresh = await ended(router, request(3, second))
        assert (strays, fresh.cached_prompt_tokens) == (0, 0)


async def test_a_session_moves_when_its_worker_dies_or_is_lent_out_and_comes_back_after(
    serve_router: Serve,
) -> None:
    async with serve_router("scripted") as router:
        assert (await ended(router, request(1, [5]), prefer=1))[0] == 1
        router.release(1)
        assert (await ended(router, request(2, [5]), prefer=1))[0] == 0
        pinned, _ = await ended(router, request(3, [5]), worker=1)
        assert pinned == 1
        assert router.take_back() == [1]
        assert router.take_back() == []
        assert (await ended(router, request(4, [5]), prefer=1))[0] == 1
        (lost,) = [process for process in router.processes() if process.index == 1]
        lost.kill()
        await asyncio.wait_for(asyncio.shield(lost.lost), DEADLINE_S)
        await asyncio.sleep(0)  # the keeper has heard of it
        assert (await ended(router, request(5, [5]), prefer=1))[0] == 0


async def test_the_death_of_a_worker_and_its_replacement_are_told_to_the_supervisor(
    serve_router: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = news_pipe()
    monkeypatch.setenv(NEWS_VARIABLE, str(writing))
    async with serve_router("scripted") as router, aclosing(heard(reading)) as news:
        (lost,) = [process for process in router.processes() if process.index == 1]
        lost.kill()
        async with asyncio.timeout(DEADLINE_S):
            assert await anext(news) == ("impaired", "engine worker 1 was killed by SIGKILL")
            kind, what = await anext(news)
        assert (kind, what.partition(" after ")[0]) == ("recovered", "engine worker 1")
        assert [process.index for process in router.processes()] == [0, 1]
    os.close(writing)


async def test_a_released_worker_serves_while_it_is_the_only_one(serve_router: Serve) -> None:
    async with serve_router("scripted") as router:
        router.release(0)
        router.release(1)
        assert (await ended(router, request(1, [5])))[0] == 0


async def test_idleness_is_told_by_worker_and_only_after_the_last_token(
    serve_router: Serve,
) -> None:
    async with serve_router("scripted") as router:
        generation = router.submit(request(1, [5], max_tokens=300), worker=0)
        busy = asyncio.create_task(router.idle_for(0, 0.01))
        await asyncio.wait_for(router.idle_for(1, 0.01), DEADLINE_S)
        assert router._slots[0].idle_since_s is None or generation.finished
        await asyncio.wait_for(busy, DEADLINE_S)
        assert generation.finished
        since = router._slots[0].idle_since_s
        assert since is not None
        assert time.monotonic() - since >= 0.01
