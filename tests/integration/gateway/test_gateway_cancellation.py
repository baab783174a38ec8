"""A cancelled request frees its slot in the engine: by counts of rounds, over HTTP and gRPC, on
both engines.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio
from integration.gateway.held_worker import ADDRESS_VARIABLE, HELD_WORKER, LONG_TOKENS

from paceline.local.patience import patient
from paceline.rpc import responses
from paceline.services.rollout_gateway.engines import ENGINES
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

POLICY = Path(__file__).parents[3] / "examples" / "demo" / "policy_start"
LONG = {"prompt": "12:8=", "max_tokens": 2 * LONG_TOKENS, "ignore_eos": True, "seed": 1}
SHORT = {"prompt": "8:2=", "max_tokens": 3, "ignore_eos": True, "seed": 2}
DEADLINE_S = patient(30)
SCRIPTED = f"{HELD_WORKER}:HELD_SCRIPTED"


class Events:
    """Events of the worker, in order."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket

    async def next(self) -> tuple[str, list[int], int, int]:
        """(event, request ids, requests in the batch, requests waiting)."""
        told: Any = await asyncio.wait_for(self._socket.recv_json(), DEADLINE_S)
        return told["event"], told["ids"], told["running"], told["waiting"]

    async def expect(self, event: str, running: int, waiting: int) -> list[int]:
        """Asserts the next event; returns its request ids."""
        told, ids, *load = await self.next()
        assert (told, load) == (event, [running, waiting])
        return ids


@pytest.fixture
async def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Events]:
    """Makes workers of both engines hold rounds and report events."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PULL)
    address = f"ipc://{tmp_path}/events"
    socket.bind(address)
    monkeypatch.setenv(ADDRESS_VARIABLE, address)
    inherited = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, inherited)))
    held = replace(ENGINES["embedded"], process=HELD_WORKER)
    monkeypatch.setitem(ENGINES, "embedded", held)
    yield Events(socket)
    context.destroy(linger=0)


def settings(kind: str) -> dict[str, Any]:
    # Two requests reach the worker, which runs one request. The other waits in the worker, not in
    # the gateway's queue.
    keys: dict[str, Any] = {
        "engine": {"kind": kind, "workers": 1, "max_batch": 1},
        "queue": {"running": 2},
    }
    return {**keys, "model": str(POLICY), "drafter": "ngram"} if kind == "embedded" else keys


async def whole(served: Any, body: dict[str, Any]) -> None:
    response = await served.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text


async def streamed(served: Any, body: dict[str, Any]) -> None:
    async with served.http.stream(
        "POST", "/v1/completions", json={**body, "stream": True}
    ) as response:
        assert response.status_code == 200
        async for _ in response.aiter_lines():
            pass


async def by_grpc(served: Any, body: dict[str, Any]) -> None:
    names = ("max_tokens", "ignore_eos", "seed")
    sampling = tpb.SamplingParams(temperature=1.0, **{name: body[name] for name in names})
    request = rpb.GenerateRequest(text=body["prompt"], sampling=sampling)
    async for _ in responses(served.stub.Generate(request, timeout=patient(60))):
        pass


CALLERS = (whole, streamed, by_grpc)


def begin(call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(call)


async def go_away(caller: asyncio.Task[None]) -> None:
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["embedded", SCRIPTED])
async def test_a_caller_that_goes_away_is_in_no_round_after_the_one_under_way(
    serve_gateway: Any, events: Events, kind: str
) -> None:
    async with serve_gateway(**settings(kind)) as served:
        for call in CALLERS:
            leaving = begin(call(served, LONG))
            (long,) = await events.expect("enqueue", 0, 1)
            assert await events.expect("round", 1, 0) == [long]
            staying = begin(call(served, SHORT))
            (short,) = await events.expect("enqueue", 1, 1)
            assert await events.expect("round", 1, 1) == [long]
            # The reported round does not end before the next command, so it is the round under way.
            await go_away(leaving)
            assert await events.expect("abort", 0, 1) == [long]
            rounds = []
            while not rounds or rounds[-1][1]:
                event, ids, running, waiting = await events.next()
                assert (event, ids, waiting) == ("round", [short], 0)
                rounds.append((ids, running))
            await asyncio.wait_for(staying, DEADLINE_S)


async def test_a_caller_that_goes_away_while_it_waits_never_enters(
    serve_gateway: Any, events: Events
) -> None:
    async with serve_gateway(**settings(SCRIPTED)) as served:
        for call in CALLERS:
            running = begin(call(served, LONG))
            (long,) = await events.expect("enqueue", 0, 1)
            await events.expect("round", 1, 0)
            waiting = begin(call(served, SHORT))
            (short,) = await events.expect("enqueue", 1, 1)
            assert await events.expect("round", 1, 1) == [long]
            await go_away(waiting)
            assert await events.expect("abort", 1, 0) == [short]
            assert await events.expect("round", 1, 0) == [long]
            await go_away(running)
            assert await events.expect("abort", 0, 0) == [long]
