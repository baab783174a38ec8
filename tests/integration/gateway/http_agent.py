"""An agent over plain HTTP, and the answers that the scripted engine must have given it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from examples.scripted_engine.script import Script, ScriptedSpec
from paceline.local.patience import patient
from paceline.services.rollout_gateway.workers.local import engine_settings
from paceline.v1 import rollout_pb2 as rpb

SLOW = {"real_time": True, "default_cost_s": 0.01, "costs_s": {}, "arms": ["off"]}
"""Script with a token every 10 ms."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@dataclass
class Agent:
    """A session and its key."""

    http: httpx.AsyncClient
    session: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.session["id"])

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.session['api_key']}"}

    async def post(
        self, path: str, body: dict[str, Any] | None = None, *, status: int = 200
    ) -> dict[str, Any]:
        response = await self.http.post(path, json=body or {}, headers=self.headers)
        assert response.status_code == status, response.text
        return dict(response.json())

    async def chat(
        self, messages: list[dict[str, Any]], *, status: int = 200, **body: Any
    ) -> dict[str, Any]:
        return await self.post(
            "/v1/chat/completions", {"messages": messages, "max_tokens": 64, **body}, status=status
        )

    async def act(
        self, verb: str, body: dict[str, Any] | None = None, *, status: int = 200
    ) -> dict[str, Any]:
        """Sends reward, complete, abort or fail to the key's session."""
        return await self.post(f"/v1/sessions/current/{verb}", body, status=status)

    async def reward(self, value: float, *, status: int = 200, **body: Any) -> dict[str, Any]:
        return await self.act("reward", {"value": value, **body}, status=status)

    async def show(self) -> dict[str, Any]:
        return dict((await self.http.get("/v1/sessions/current", headers=self.headers)).json())

    async def export(self, form: str) -> list[dict[str, Any]]:
        response = await self.http.get(
            f"/v1/sessions/{self.id}/export", params={"form": form}, headers=self.headers
        )
        assert response.status_code == 200, response.text
        return list(response.json()[form])


async def opened(served: Any, **body: Any) -> Agent:
    """Opens a session for the agent."""
    response = await served.http.post("/v1/sessions", json=body)
    assert response.status_code == 201, response.text
    return Agent(served.http, response.json())


async def claimed(served: Any, wait_s: float = 5.0, **body: Any) -> Agent | None:
    """An agent with a claimed task of the run. None if no task was offered, or if no run has begun
    on a gateway without trajectories.
    """
    response = await offered(served, wait_s, body)
    if response.status_code == 409 and response.json()["error"]["code"] == "no_tasks_offered":
        return None
    assert response.status_code in (201, 204), response.text
    return Agent(served.http, response.json()) if response.status_code == 201 else None


async def offered(served: Any, wait_s: float, body: dict[str, Any]) -> httpx.Response:
    """The answer to a claim. The gateways of tests keep no trajectories, so they answer 409 until
    the first RunTasks call.
    """
    claim = {"claim": True, "wait_s": wait_s, **body}
    end = time.monotonic() + patient(wait_s)
    while True:
        response = await served.http.post("/v1/sessions", json=claim)
        if response.status_code != 409 or time.monotonic() >= end:
            return response


def message_of(answer: dict[str, Any]) -> dict[str, Any]:
    return dict(answer["choices"][0]["message"])


class Oracle:
    """The answer that the scripted engine chooses by itself."""

    def __init__(self, served: Any) -> None:
        self._script = Script(ScriptedSpec.model_validate(engine_settings(served.config)))

    def said(self, prompt: list[int], seed: int, limit: int = 64) -> list[int]:
        return list(self._script.answer(tuple(prompt), seed).token_ids[:limit])


def prompt_of(tree: list[dict[str, Any]], completion_id: str) -> list[int]:
    """All tokens that the engine saw before it generated this turn."""
    turns = {turn["completion_id"]: turn for turn in tree}
    turn = turns[completion_id]
    before: list[int] = []
    if turn["parent"] is not None:
        before = prompt_of(tree, turn["parent"]) + turns[turn["parent"]]["response_ids"]
    return before + list(turn["prompt_ids"])


async def loads(served: Any) -> list[int]:
    """Number of requests in each worker."""
    status = await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
    return [worker.health.running + worker.health.waiting for worker in status.workers]


async def until_running(served: Any, count: int) -> None:
    """Waits for so many requests in the engines."""
    async with asyncio.timeout(patient(10)):
        while sum(await loads(served)) != count:
            pass


async def until_open(served: Any, count: int) -> None:
    """Waits for so many open sessions."""
    async with asyncio.timeout(patient(10)):
        while (
            await served.stub.GetStatus(rpb.GetStatusRequest(), timeout=patient(5))
        ).open_sessions != count:
            pass


@asynccontextmanager
async def task_run(served: Any, request: rpb.RunTasksRequest) -> AsyncIterator[list[Any]]:
    """A RunTasks call that runs beside the block, which must let it end; its events are appended to
    the list.
    """
    told: list[Any] = []

    async def run() -> None:
        async for event in served.stub.RunTasks(request, timeout=patient(60)):
            told.append(event)

    call = asyncio.create_task(run())
    try:
        yield told
        await asyncio.wait_for(call, patient(20))
    finally:
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
