"""The coordinator learns of callers that wait for lent workers; leases end without watchers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from integration.gateway.commands import release, resume
from integration.gateway.conftest import Served

from paceline.local.patience import patient
from paceline.services.rollout_gateway.config import GatewayConfig
from paceline.v1 import rollout_pb2 as rpb

PATIENCE_S = patient(20)
SLOW = {"real_time": True, "default_cost_s": 0.05, "costs_s": {}, "arms": ["off"]}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the delay before the coordinator is notified."""
    monkeypatch.setattr(GatewayConfig, "reclaim_after_s", 0.2)


@asynccontextmanager
async def listening(served: Served) -> AsyncIterator[Any]:
    call = served.stub.WatchTraffic(rpb.WatchTrafficRequest(), timeout=PATIENCE_S)
    await call.initial_metadata()
    try:
        yield call
    finally:
        call.cancel()


def ask(served: Served, max_tokens: int = 8) -> asyncio.Task[httpx.Response]:
    asked = {"model": served.config.model_dir.name, "prompt": "1+1=", "max_tokens": max_tokens}
    return asyncio.create_task(served.http.post("/v1/completions", json=asked))


async def answered(request: asyncio.Task[httpx.Response]) -> None:
    answer = await asyncio.wait_for(request, PATIENCE_S)
    assert answer.status_code == 200, answer.text


async def test_callers_that_wait_for_lent_workers_are_told_of_and_served_once_they_are_back(
    serve_gateway: Any,
) -> None:
    async with serve_gateway(engine={"workers": 2}) as served:
        await release(served, 3, 0, 1)
        async with listening(served) as news:
            waits = ask(served)
            told = await news.read()
            assert (told.epoch, told.requests, list(told.workers)) == (3, 1, [0, 1])
            async with listening(served) as late:
                assert await late.read() == told, "who listens later is told as well"
            assert not waits.done()
            assert await resume(served, 4) == ([0, 1], 0)
            await answered(waits)


async def test_nothing_is_told_while_nobody_waits_for_a_lent_worker(
    serve_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GatewayConfig, "reclaim_after_s", 0.01)
    async with (
        serve_gateway(engine={"workers": 2}) as served,
        listening(served) as news,
    ):
        await release(served, 3, 0)
        for _ in range(5):
            await answered(ask(served))
        await resume(served, 4)
        await release(served, 5, 0, 1)
        waits = ask(served)
        assert (await news.read()).epoch == 5, "the first that is told"
        await resume(served, 6)
        await answered(waits)


async def test_more_than_the_serving_workers_take_at_once_is_told_of(
    serve_gateway: Any, script: dict[str, Any]
) -> None:
    script |= SLOW
    async with serve_gateway(engine={"workers": 2, "max_batch": 1}) as served:
        await release(served, 3, 1)
        async with listening(served) as news:
            requests = [ask(served, max_tokens=200) for _ in range(3)]
            told = await news.read()
            assert (told.epoch, list(told.workers)) == (3, [1])
            assert 1 <= told.requests <= 2
            assert await resume(served, 4) == ([1], 0)
            for request in requests:
                await answered(request)


async def test_lent_workers_serve_again_when_their_coordinator_is_gone(
    serve_gateway: Any,
) -> None:
    async with serve_gateway() as served:
        async with listening(served):
            await release(served, 3, 0, outlasts_s=0.2)
            waits = ask(served)
            with pytest.raises(TimeoutError):  # while a watcher is connected
                await asyncio.wait_for(asyncio.shield(waits), 0.6)
        await answered(waits)
        await release(served, 4, 0, outlasts_s=0.2)  # by a coordinator that never watched traffic
        await answered(ask(served))


async def test_a_restarted_gateway_ends_the_leases_of_a_coordinator_that_stays_away(
    serve_gateway: Any,
) -> None:
    async with serve_gateway() as served, listening(served):
        await release(served, 3, 0, outlasts_s=600.0)
    noted = served.config.spool / "lent.json"
    lent = {"workers": [0], "outlasts_s": 600.0, "epoch": 3}
    assert json.loads(noted.read_text()) == lent
    noted.write_text(json.dumps({**lent, "outlasts_s": 0.2}))  # it cannot end before the restart
    async with serve_gateway() as served:
        await answered(ask(served))
    assert json.loads(noted.read_text())["workers"] == []
