"""Sticky turns, lent slots and idleness over real worker processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from integration.gateway.conftest import Ends
from standstill import standstill

from examples.scripted_engine.engine import SCRIPTED_PATH
from paceline.local.child import LIMIT_S
from paceline.local.news import heard, news_pipe
from paceline.local.patience import patient
from paceline.local.processes import NEWS_VARIABLE
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.services.rollout_gateway.workers.router import Router
from paceline.services.rollout_gateway.workers.weights import WorkerWeights
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.weights import Spool

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
def serve_router(tmp_path: Path) -> Serve:
    @asynccontextmanager
    async def serve(
        kind: str, script: dict[str, Any] | None = None, wait_s: float = DEADLINE_S
    ) -> AsyncIterator[Router]:
        engine: dict[str, Any] = {"kind": kind, "workers": 2}
        if script:
            (tmp_path / "script.json").write_text(json.dumps(script))
            engine["options"] = {"file": str(tmp_path / "script.json")}
        settings = {"model": str(POLICY), "engine": engine, "queue": {"wait_s": wait_s}}
        config = GatewayConfig.model_validate(settings)
        router = Router(config, lambda _: None, lambda _: None)
        weights = WorkerWeights(router, Spool(tmp_path, initial={}))
        router.lending.on_return = weights.take_memory
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
    async with serve_router(SCRIPTED_PATH) as router:
        assert (await ended(router, request(1, [5]), prefer=1))[0] == 1
        router.lending.release(1)
        assert (await ended(router, request(2, [5]), prefer=1))[0] == 0
        pinned = asyncio.create_task(ended(router, request(3, [5]), worker=1))
        await asyncio.sleep(0)
        assert not router.seats[1].live
        assert await router.lending.take_back() == [1]
        assert await router.lending.take_back() == []
        assert (await pinned)[0] == 1
        assert (await ended(router, request(4, [5]), prefer=1))[0] == 1
        (lost,) = [process for process in router.processes() if process.index == 1]
        lost.kill()
        await asyncio.wait_for(asyncio.shield(lost.lost), DEADLINE_S)
        await asyncio.sleep(0)  # the keeper has received it
        assert (await ended(router, request(5, [5]), prefer=1))[0] == 0


async def test_the_death_of_a_worker_and_its_replacement_are_told_to_the_supervisor(
    serve_router: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = news_pipe()
    monkeypatch.setenv(NEWS_VARIABLE, str(writing))
    async with serve_router(SCRIPTED_PATH) as router, aclosing(heard(reading)) as news:
        (lost,) = [process for process in router.processes() if process.index == 1]
        lost.kill()
        async with asyncio.timeout(DEADLINE_S):
            assert await anext(news) == ("impaired", "engine worker 1 was killed by SIGKILL")
            kind, what = await anext(news)
        assert (kind, what.partition(" after ")[0]) == ("recovered", "engine worker 1")
        assert [process.index for process in router.processes()] == [0, 1]
    os.close(writing)


async def test_requests_of_a_stopped_worker_are_answered_by_another_one(
    serve_router: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = news_pipe()
    monkeypatch.setenv(NEWS_VARIABLE, str(writing))
    async with (
        serve_router(SCRIPTED_PATH) as router,
        aclosing(heard(reading)) as news,
        standstill() as stood_s,
    ):
        alone = await ended(router, request(1, [5], max_tokens=40), worker=0)
        (stopped,) = [process for process in router.processes() if process.index == 1]
        os.kill(stopped.pid, signal.SIGSTOP)
        began, stood_before_s = time.monotonic(), stood_s()
        under_way = asyncio.create_task(ended(router, request(1, [5], max_tokens=40), prefer=1))
        kind, what = await asyncio.wait_for(anext(news), patient(DEADLINE_S))
        stood = stood_s() - stood_before_s
        assert time.monotonic() - began < LIMIT_S + patient(LIMIT_S / 6) + 1.0 + stood
        assert (kind, what) == (
            "impaired",
            "engine worker 1 was killed by SIGKILL, stopped for 3 s",
        )
        assert (await under_way)[1].token_ids == alone[1].token_ids
        async with asyncio.timeout(DEADLINE_S):
            kind, what = await anext(news)
        assert (kind, what.partition(" after ")[0]) == ("recovered", "engine worker 1")
        assert (await ended(router, request(3, [5]), worker=1))[0] == 1
    os.close(writing)


async def test_requests_wait_while_all_workers_are_lent_and_run_when_one_is_back(
    serve_router: Serve,
) -> None:
    async with serve_router(SCRIPTED_PATH) as router:
        expected = (await ended(router, request(1, [5], max_tokens=9)))[1].token_ids
        lent = await asyncio.gather(router.lending.lend(0), router.lending.lend(1))
        assert set(lent) == {2_107_392}
        assert await router.lending.lend(1) == 0
        waiting = router.submit(request(1, [5], max_tokens=9))
        given_up = router.submit(request(2, [5]))
        router.abort(given_up)
        assert given_up.whole.finish_reason == tpb.FINISH_REASON_ABORT
        assert not router.seats[0].live
        assert not router.seats[1].live
        assert await router.lending.take_back() == [0, 1]
        async with asyncio.timeout(DEADLINE_S):
            async for _ in waiting.chunks():
                pass
        assert list(waiting.whole.token_ids) == list(expected)


async def test_a_request_that_no_worker_comes_back_for_ends_at_its_deadline(
    serve_router: Serve,
) -> None:
    async with serve_router(SCRIPTED_PATH, wait_s=0.05) as router:
        router.lending.release(0)
        router.lending.release(1)
        generation = router.submit(request(1, [5]))
        async with asyncio.timeout(DEADLINE_S):
            async for _ in generation.chunks():
                pass
        assert generation.whole.finish_reason == tpb.FINISH_REASON_ERROR
        assert generation.whole.error == (
            "UNAVAILABLE: the engine's slots are lent to a trainer; waited 0.05 s "
            "(gateway.queue.wait_s)"
        )


SLOW = {
    "real_time": True,
    "default_cost_s": 0.02,
    "costs_s": {},
    "arms": ["off"],
    "response_tokens": [200, 200],
}


@pytest.mark.parametrize("drain_s", [0.1, 0.0])
@pytest.mark.parametrize("others", [True, False], ids=["another serves", "all are lent"])
async def test_a_request_that_outlasts_the_drain_goes_on_elsewhere_with_the_same_tokens(
    serve_router: Serve, tmp_path: Path, drain_s: float, *, others: bool
) -> None:
    ends = Ends(tmp_path / "ends")
    async with serve_router(SCRIPTED_PATH, {**SLOW, "ends_with": str(ends.path)}) as router:
        ends.come()
        expected = (await ended(router, request(1, [5], max_tokens=60)))[1].token_ids
        ends.wait()
        generation = router.submit(request(2, [5], max_tokens=60), prefer=0)
        generation.request.sampling.seed = 1
        await anext(generation.chunks())
        lent = [0] if others else [0, 1]
        freed = await asyncio.gather(*(router.lending.lend(one, drain_s) for one in lent))
        assert min(freed) > 0
        kept = list(generation.request.response_token_ids)
        assert 0 < len(kept) < 60
        assert kept == list(expected[: len(kept)])
        assert not any(router.seats[index].live for index in lent)
        ends.come()
        if not others:
            await router.lending.take_back()
        async with asyncio.timeout(DEADLINE_S):
            async for _ in generation.chunks():
                pass
        assert generation.whole.finish_reason == tpb.FINISH_REASON_LENGTH
        assert list(generation.whole.token_ids) == list(expected)
        assert (generation.worker_index, generation.tries) == (1 if others else 0, 0)
        assert sum(span.end - span.start for span in generation.whole.version_spans) == 60


async def test_a_worker_that_dies_while_it_is_lent_starts_without_memory_and_comes_back(
    serve_router: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = news_pipe()
    monkeypatch.setenv(NEWS_VARIABLE, str(writing))
    async with serve_router(SCRIPTED_PATH) as router, aclosing(heard(reading)) as news:
        await router.lending.lend(0)
        (lost,) = [process for process in router.processes() if process.index == 0]
        lost.kill()
        async with asyncio.timeout(DEADLINE_S):
            assert [(await anext(news))[0], (await anext(news))[0]] == ["impaired", "recovered"]
        fresh = router.seats[0].process
        assert fresh is not None
        again = pb.WorkerCommand(release_memory=pb.ReleaseMemory())
        released = await fresh.ask(again, DEADLINE_S)
        assert released.done.released_bytes == 0  # the memory is already released
        assert await router.lending.take_back() == [0]
        assert (await ended(router, request(4, [5]), worker=0))[0] == 0
    os.close(writing)


async def test_idleness_is_told_by_worker_and_only_after_the_last_token(
    serve_router: Serve,
) -> None:
    async with serve_router(SCRIPTED_PATH) as router:
        generation = router.submit(request(1, [5], max_tokens=300), worker=0)
        busy = asyncio.create_task(router.seats[0].idle_for(0.01))
        await asyncio.wait_for(router.seats[1].idle_for(0.01), DEADLINE_S)
        assert router.seats[0].idle_since_s is None or generation.finished
        await asyncio.wait_for(busy, DEADLINE_S)
        assert generation.finished
        since = router.seats[0].idle_since_s
        assert since is not None
        assert time.monotonic() - since >= 0.01
