"""Measures the samples of tasks that pass through a gateway per second: RunTasks over the scripted
engine. Its tokens cost nothing, so the figure is the gateway's own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gateway.fronts import gateway_with
from benchmarks.result import Row, say
from examples.scripted_engine.engine import SCRIPTED_PATH
from paceline.config import SecurityConfig
from paceline.errors import InternalError
from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.rpc import channel, leased, responses, rpc_errors
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub

SECTION = "tasks"
RUN_ID = "bench"
CALL_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class TasksPlan:
    """The plan made from the options."""

    tasks: int  # of a call
    samples: int  # of a task
    tokens: int  # of a response at most
    repeats: int


@asynccontextmanager
async def _gateway(plan: TasksPlan, folder: Path, model: Path, script: Path) -> AsyncIterator[Any]:
    """Runs a gateway; yields its stub."""
    port, name = free_port(), "gateway-of-tasks"
    own = {
        "model": str(model),
        "engine.kind": SCRIPTED_PATH,
        "engine.options.file": str(script),
        "engine.workers": 2,
        "engine.max_batch": plan.tasks * plan.samples,
        "run.dir": str(folder / name),
        "run.id": RUN_ID,
    }
    settings = (f"addresses.gateway=127.0.0.1:{port}",)
    async with gateway_with(folder, name, own, settings), rollout_stub(port) as stub:
        yield stub


@asynccontextmanager
async def rollout_stub(port: int) -> AsyncIterator[Any]:
    """Yields a stub for a gateway's RolloutService on this machine."""
    connection = channel(f"127.0.0.1:{port}", SecurityConfig(token_env=""))
    try:
        yield RolloutServiceStub(connection)
    finally:
        await connection.close()


async def measure_tasks(plan: TasksPlan, folder: Path, model: Path, script: Path) -> list[float]:
    """Samples per second of each call."""
    found = []
    async with _gateway(plan, folder, model, script) as stub:
        await samples_a_second(stub, plan, 0)
        for number in range(plan.repeats):
            say(f"tasks {number + 1} of {plan.repeats}")
            found.append(await samples_a_second(stub, plan, number + 1))
    return found


async def samples_a_second(stub: Any, plan: TasksPlan, step: int) -> float:
    """Makes one call; returns its samples per second."""
    request = rpb.RunTasksRequest(
        context=leased(SecurityConfig(token_env=""), RUN_ID, step, 1),
        purpose=tpb.PURPOSE_TRAIN,
        tasks=[
            rpb.TaskSpec(task_id=f"{task}", prompt=f"{task}=", group_id=f"{step}-{task}")
            for task in range(plan.tasks)
        ],
        samples_per_task=plan.samples,
        sampling=tpb.SamplingParams(temperature=1.0, max_tokens=plan.tokens),
        environment="single_turn",
        reward="math_answer",
    )
    began_s = time.perf_counter()
    ended = await ended_samples(stub, request)
    return len(ended) / (time.perf_counter() - began_s)


async def ended_samples(stub: Any, request: rpb.RunTasksRequest) -> list[rpb.SampleFinished]:
    """A call's samples in the order of their ends. Raises InternalError if samples are lost."""
    call = stub.RunTasks(request, timeout=patient(CALL_DEADLINE_S))
    ended = []
    with rpc_errors():
        async with aclosing(responses(call)) as news:
            async for one in news:
                if one.HasField("sample"):
                    ended.append(one.sample)
    wanted = len(request.tasks) * request.samples_per_task
    if len(ended) != wanted:
        raise InternalError("samples were lost on their way", seen=len(ended), allowed=wanted)
    return ended


def task_rows(plan: TasksPlan, rates: Sequence[float]) -> list[Row]:
    """Makes the row of the calls."""
    return [
        {
            "section": SECTION,
            "samples/s": statistics.median(rates),
            "calls": len(rates),
            "samples a call": plan.tasks * plan.samples,
        }
    ]
