"""A running gateway answers any bytes over HTTP or gRPC without an internal error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from fuzz.decoders import BODIES, bodies
from fuzz.noise import fuzz
from integration.gateway.conftest import Served, serving, sums, tiny_model
from integration.gateway.conversations import teach

from paceline.local.patience import patient
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.v1 import weights_pb2 as wpb

pytestmark = pytest.mark.fuzz

CONTEXT = tpb.CommandContext(run_id="local", epoch=1)
SAMPLING = tpb.SamplingParams(temperature=1.0, max_tokens=4, stop=["a"], logit_bias={5: 1.0})
CALLS: dict[str, tuple[Any, ...]] = {
    "RolloutService/Generate": (
        rpb.GenerateRequest(text="1+1=", sampling=SAMPLING),
        rpb.GenerateRequest(token_ids=rpb.TokenIds(ids=[1, 2]), sampling=SAMPLING),
    ),
    "RolloutService/RunTasks": (
        rpb.RunTasksRequest(
            context=CONTEXT,
            tasks=[rpb.TaskSpec(task_id="a", prompt="1+1=", metadata={"a": "b"})],
            samples_per_task=1,
            sampling=SAMPLING,
            environment="single_turn",
            reward="math_answer",
        ),
    ),
    "RolloutService/ReleaseWorkers": (rpb.ReleaseWorkersRequest(context=CONTEXT, workers=[0]),),
    "RolloutService/ResumeWorkers": (rpb.ResumeWorkersRequest(context=CONTEXT),),
    "RolloutService/GetStatus": (rpb.GetStatusRequest(),),
    "WeightService/Prepare": (
        wpb.PrepareRequest(context=CONTEXT, manifest=wpb.Manifest(version=1)),
    ),
    "WeightService/Push": (wpb.PushRequest(context=CONTEXT, version=1, data=b"x"),),
    "WeightService/Commit": (wpb.CommitRequest(context=CONTEXT),),
    "WeightService/Abort": (wpb.AbortRequest(context=CONTEXT, version=1),),
    "WeightService/GetVersions": (wpb.GetVersionsRequest(),),
}
"""Valid requests of the gateway's methods."""


class Gateway:
    """A running gateway that a synchronous property can call."""

    def __init__(self, directory: Path) -> None:
        model = tiny_model(directory / "tiny-model")
        script = sums(model)
        teach(model, script)
        self._loop, self._open = asyncio.new_event_loop(), AsyncExitStack()
        # On the same loop as the calls: it runs while they do.
        started = self._open.enter_async_context(serving(model, script))
        self.served: Served = self._loop.run_until_complete(started)

    def close(self) -> None:
        self._loop.run_until_complete(self._open.aclose())
        self._loop.close()

    def post(self, path: str, raw: bytes) -> int:
        """Sends a request; returns the answer's status."""
        headers = {"content-type": "application/json"}
        asked = self.served.http.post(path, content=raw, headers=headers)
        return self._loop.run_until_complete(asked).status_code

    def call(self, method: str, raw: bytes) -> grpc.StatusCode:
        """Calls the method; returns the call's status."""

        async def ask() -> grpc.StatusCode:
            call = self.served.channel.stream_stream(f"/paceline.v1.{method}")(timeout=patient(20))
            with suppress(grpc.aio.AioRpcError):
                await call.write(raw)
                await call.done_writing()
                async for _ in call:  # the status follows the answers
                    pass
            code: grpc.StatusCode = await call.code()
            return code

        return self._loop.run_until_complete(ask())


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    made = Gateway(tmp_path_factory.mktemp("fuzzed"))
    yield made
    made.close()


@pytest.mark.parametrize("path", BODIES)
def test_a_body_of_noise_gets_an_answer(path: str, gateway: Gateway) -> None:
    def send(raw: bytes) -> None:
        assert gateway.post(path, raw) < 500

    fuzz(bodies(path), send)


@pytest.mark.parametrize("method", CALLS)
def test_a_call_of_noise_ends_with_a_status(method: str, gateway: Gateway) -> None:
    faults = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED)

    def send(raw: bytes) -> None:
        assert gateway.call(method, raw) not in faults

    fuzz([one.SerializeToString() for one in CALLS[method]], send)
