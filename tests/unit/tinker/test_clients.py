"""The order of calls: by number within a client, by optimiser steps between clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paceline.errors import FailedPrecondition, InvalidInput, PacelineError
from paceline.services.tinker.clients import Clients, TrainingClient
from paceline.services.tinker.futures import LOST, Futures, Result
from paceline.v1 import policy_pb2 as pb
from paceline.v1.tinker_pb2 import TinkerForwardBackward


class Recorder:
    """A trainer that notes orders, and fails with the errors given to it."""

    def __init__(self) -> None:
        self.orders: list[str] = []
        self.errors: list[PacelineError] = []

    async def order(self, learner: str, **order: Any) -> pb.LearnResponse:
        [(kind, value)] = order.items()
        path = f" {value.path}" if kind in ("create", "save") and value.path else ""
        self.orders.append(f"{learner} {kind}{path}")
        if self.errors:
            raise self.errors.pop(0)
        return pb.LearnResponse(rank=4)


class World:
    """Clients over a recorder."""

    def __init__(self, gap_s: float = 60.0) -> None:
        self.trainer = Recorder()
        self.futures = Futures(100, 1 << 20)
        self.clients = Clients(self.trainer, self.futures, gap_s)  # type: ignore[arg-type]

    def client(self, name: str) -> TrainingClient:
        client = TrainingClient(name, "s")
        self.clients.add(client)

        async def created() -> Result:
            await self.clients.create(client)
            return Result.of()

        self.clients.submit(client, 0, 0, created)
        return client

    def call(self, client: TrainingClient, seq: int, kind: str = "forward_backward") -> str:
        """Queues a forward_backward or optim_step."""

        async def work() -> Result:
            await self.clients.order(client, **{kind: _MESSAGES[kind]()})
            client.gradient = kind == "forward_backward"
            if kind == "optim_step":
                client.changed = True
                self.clients.end_turn()
            return Result.of()

        return self.clients.submit(client, seq, 0, work).name

    async def result(self, name: str) -> Any:
        found = await self.futures.wait(name, 5.0)
        assert found is not None
        return json.loads(found.body)


_MESSAGES = {"forward_backward": TinkerForwardBackward, "optim_step": pb.OptimStep}


@asynccontextmanager
async def running(world: World) -> AsyncIterator[None]:
    task = asyncio.create_task(world.clients.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_calls_run_by_number_and_clients_change_after_an_optimiser_step() -> None:
    world = World()
    a, b = world.client("a"), world.client("b")
    names = [world.call(a, 2, "optim_step"), world.call(a, 1), world.call(b, 1)]
    names += [world.call(b, 2, "optim_step"), world.call(a, 3), world.call(a, 4, "optim_step")]
    async with running(world):
        for name in names:
            assert await world.result(name) == {}
    assert world.trainer.orders == [
        *("a create", "a forward_backward", "a optim_step"),
        *("a save a/resident", "b create", "b forward_backward", "b optim_step"),
        *("b save b/resident", "a create a/resident", "a forward_backward", "a optim_step"),
    ]


async def test_a_client_with_a_gradient_keeps_the_learner() -> None:
    world = World()
    a = world.client("a")
    async with running(world):
        await world.result(world.call(a, 1))
        b = world.client("b")
        other = world.call(b, 1)
        assert await world.futures.wait(other, 0.05) is None
        world.call(a, 2, "optim_step")
        assert await world.result(other) == {}


async def test_the_end_of_a_session_frees_the_learner_and_fails_its_calls() -> None:
    world = World()
    a = world.client("a")
    async with running(world):
        await world.result(world.call(a, 1))
        waiting, other = world.call(a, 3), world.call(world.client("b"), 1)
        world.clients.drop(a)
        assert "session has ended" in (await world.result(waiting))["error"]
        assert await world.result(other) == {}


async def test_a_call_whose_predecessor_never_arrives_fails_and_later_calls_run() -> None:
    world = World(gap_s=0.01)
    a = world.client("a")
    async with running(world):
        late = await world.result(world.call(a, 2))
        assert late["category"] == "user"
        assert "seq_id 1" in late["error"]
        assert await world.result(world.call(a, 3)) == {}
        with pytest.raises(InvalidInput, match="earlier call"):
            world.call(a, 1)


async def test_a_repeated_call_has_the_future_of_the_first() -> None:
    world = World()
    a = world.client("a")
    async with running(world):
        name = world.call(a, 1)
        assert world.call(a, 1) == name
        await world.result(name)
        assert world.call(a, 1) == name
    assert world.trainer.orders == ["a create", "a forward_backward"]


async def test_a_lost_learner_is_read_again_unless_steps_are_lost() -> None:
    world = World()
    a, lost = world.client("a"), FailedPrecondition("gone", reason=LOST)
    async with running(world):
        await world.result("a:0")
        world.trainer.errors = [lost]
        assert await world.result(world.call(a, 1, "optim_step")) == {}
        world.trainer.errors = [lost]
        failure = await world.result(world.call(a, 2))
        assert failure["category"] == "server"
        again = await world.result(world.call(a, 3))
        assert "lost steps" in again["error"]
        await world.clients.create(a, "a/weights/x")
        assert await world.result(world.call(a, 4)) == {}
