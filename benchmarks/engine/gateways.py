"""Runs whole gateways over the embedded engine, with the demo's settings and their own Redis
servers.

It times a gateway from its start to a first token. It also measures the cost that capture and
publication of hidden rows add to a rollout.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.engine.sections import FEWEST_PAIRS, Extent, Findings
from benchmarks.gateway.fronts import Front, gateway_with
from benchmarks.gateway.tasks import ended_samples, rollout_stub
from benchmarks.processes import redis_server, running
from benchmarks.result import Goal, Row, at_most, cost_goal, paired_ratio, say
from paceline.config import SecurityConfig
from paceline.errors import InternalError
from paceline.local.ports import free_port
from paceline.rpc import leased
from paceline.services.rollout_gateway.features import LINGER_S
from paceline.streams import connect, run_key
from paceline.tasks import Task
from paceline.tasks.file import read_tasks
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1 import trajectory_pb2 as tpb

FIRST_TOKEN_GOAL_S = 3.0
CAPTURE_GOAL = 1.03
"""Goal for the CPU time of a rollout with capture and publication over a rollout without."""
CAPTURED, PLAIN = "captured", "neither"
ARM = "eagle:5_1_6"
"""Arm of all rounds, so that both gateways do the same work."""
TASKS, SAMPLES, MAX_TOKENS = 8, 16, 368
"""Size of a rollout: a step of the demo."""
RUN_ID = "bench"
REQUEST_DEADLINE_S = 120.0
PARTS = {
    "fork server": "paceline.local.forkserver",
    "workers": "paceline.services.rollout_gateway.engines.worker.process",
}


@dataclass(frozen=True, slots=True)
class RedisPair:
    """A gateway's own servers, one for each role."""

    durable_url: str
    features_url: str
    pids: tuple[int, int]

    @classmethod
    async def start(cls, stack: AsyncExitStack) -> RedisPair:
        """Starts both servers, which run until the stack is left."""
        durable, durable_pid = await redis_server(stack, "durable")
        features, features_pid = await redis_server(stack, "features")
        return cls(durable, features, (durable_pid, features_pid))


@dataclass(frozen=True, slots=True)
class DemoGateway:
    """A gateway that serves."""

    front: Front
    port: int  # of its gRPC server
    redis: RedisPair

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far by part."""
        parts = {name: running(module, self.front.pid) for name, module in PARTS.items()}
        found = {"gateway": _cpu_s(psutil.Process(self.front.pid))}
        found |= {name: sum(map(_cpu_s, several)) for name, several in parts.items()}
        return found | {"Redis": sum(_cpu_s(psutil.Process(pid)) for pid in self.redis.pids)}

    async def batches(self) -> int:
        """Number of sessions with rows in its Redis, after the last rows have arrived."""
        before, key = -1, run_key(RUN_ID, "features")
        async with connect(self.redis.features_url) as client:
            while (now := int(await client.xlen(key))) != before:
                before = now
                await asyncio.sleep(2 * LINGER_S)
        return now


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@asynccontextmanager
async def demo_gateway(
    plan: Extent, redis: RedisPair, run: Path, **changes: Any
) -> AsyncIterator[DemoGateway]:
    """Runs a gateway with the demo's settings and `changes`; `run` is its run's directory."""
    port = free_port()
    own = {
        "model": str(plan.demo / "policy_start"),
        "drafter": str(plan.demo / "drafter_start"),
        "engine.threads": plan.threads,
        "run.dir": str(run),
        "run.id": RUN_ID,
        "telemetry.spans_dir": str(run / "spans"),
        "redis.durable_url": redis.durable_url,
        "redis.features_url": redis.features_url,
        **changes,
    }
    words = ("--config", str(plan.demo / "demo.toml"), f"addresses.gateway=127.0.0.1:{port}")
    async with gateway_with(run.parent, run.name, own, words) as front:
        yield DemoGateway(front, port, redis)


@dataclass(frozen=True, slots=True)
class Launched:
    """One start of a gateway."""

    serving_s: float
    first_token_s: float
    cpu_s: Mapping[str, float]


async def launch(plan: Extent) -> Findings:
    """Times a gateway from its start to the first token of a request that is sent once it listens.

    Redis runs before. One start before the measured starts warms up the files.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-")))
        redis = await RedisPair.start(stack)
        starts = [await _launched(plan, redis, folder / str(n)) for n in range(plan.few + 1)]
    _, *measured = starts
    first = statistics.median(one.first_token_s for one in measured)
    rows: list[Row] = [
        {
            "section": "start of a gateway, the demo's settings",
            "starts": len(measured),
            "serves after s": statistics.median(one.serving_s for one in measured),
            "first token after s": first,
            "CPU s": statistics.median(sum(one.cpu_s.values()) for one in measured),
            **{
                f"CPU s, {part}": statistics.median(one.cpu_s[part] for one in measured)
                for part in measured[0].cpu_s
            },
        }
    ]
    say(f"launch: first token after {first:.2f} s")
    return Findings(rows, [at_most("s from start to first token", FIRST_TOKEN_GOAL_S, first)])


async def _launched(plan: Extent, redis: RedisPair, folder: Path) -> Launched:
    began = time.perf_counter()
    async with demo_gateway(plan, redis, folder) as gateway:
        async with httpx.AsyncClient(
            base_url=gateway.front.url, timeout=REQUEST_DEADLINE_S
        ) as client:
            serving = time.perf_counter()
            await _first_token(client)
            ended = time.perf_counter()
        cpu_s = {part: spent for part, spent in gateway.cpu_s().items() if part != "Redis"}
    return Launched(serving - began, ended - began, cpu_s)


async def _first_token(client: httpx.AsyncClient) -> None:
    """Waits for a first token. Raises InternalError if an answer has none."""
    body = {"prompt": "048:036=", "max_tokens": MAX_TOKENS, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            event = line.removeprefix("data: ")
            if event.startswith("{") and json.loads(event)["choices"][0]["text"]:
                return
    raise InternalError("no token arrived", seen=answer.status_code)


@dataclass(frozen=True, slots=True)
class RolloutTurn:
    """One rollout, and its rows in Redis."""

    seconds: float
    cpu_s: Mapping[str, float]
    tokens: int
    hashes: tuple[str, ...]
    batches: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


async def capture(plan: Extent) -> Findings:
    """Compares steps of the demo with and without hidden rows; the gateways take turns.

    Raises InternalError if no rows are published.
    """
    tasks = read_tasks(plan.demo / "tasks_train.jsonl")
    turns: dict[str, list[RolloutTurn]] = {CAPTURED: [], PLAIN: []}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-")))
        gateways: dict[str, DemoGateway] = {}
        for name in turns:
            redis = await RedisPair.start(stack)
            gateway = demo_gateway(plan, redis, folder / name, **{"speculation.forced_arm": ARM})
            gateways[name] = await stack.enter_async_context(gateway)
        for pair in range(plan.pairs + 1):
            for name in list(gateways)[:: 1 if pair % 2 else -1]:
                request = _step(plan, tasks, pair, captured=name == CAPTURED)
                one = await _rollout(gateways[name], request)
                turns[name] += [one] if pair else []
    if not sum(one.batches for one in turns[CAPTURED]):
        raise InternalError("no rows were published")
    return capture_findings(turns)


def _step(plan: Extent, tasks: Sequence[Task], step: int, *, captured: bool) -> rpb.RunTasksRequest:
    wanted, samples = (2, 2) if plan.quick else (TASKS, SAMPLES)
    return rpb.RunTasksRequest(
        context=leased(SecurityConfig(token_env=""), RUN_ID, step, 1),
        purpose=tpb.PURPOSE_TRAIN,
        tasks=[
            rpb.TaskSpec(task_id=one.task_id, prompt=one.prompt, group_id=f"{step}-{one.task_id}")
            for one in tasks[step * wanted : (step + 1) * wanted]
        ],
        samples_per_task=samples,
        sampling=tpb.SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS),
        capture=captured,
        environment="single_turn",
        reward="math_answer",
    )


async def _rollout(gateway: DemoGateway, request: rpb.RunTasksRequest) -> RolloutTurn:
    before, batches = gateway.cpu_s(), await gateway.batches()
    async with rollout_stub(gateway.port) as stub:
        began = time.perf_counter()
        ended = await ended_samples(stub, request)
        seconds = time.perf_counter() - began
    published = await gateway.batches() - batches
    spent = {part: now - before[part] for part, now in gateway.cpu_s().items()}
    hashes = tuple(sorted(one.tokens_hash for one in ended))
    return RolloutTurn(seconds, spent, sum(one.response_tokens for one in ended), hashes, published)


def capture_findings(turns: Mapping[str, Sequence[RolloutTurn]]) -> Findings:
    """Rows of both ways, and goals for the cost of capture."""
    ours, theirs = turns[CAPTURED], turns[PLAIN]
    cpu = paired_ratio(*([sum(one.cpu_s.values()) for one in way] for way in (ours, theirs)))
    rate = paired_ratio(*([one.rate for one in way] for way in (ours, theirs)))
    rows: list[Row] = [
        {
            "section": "capture and publication, the demo's settings",
            "way": name,
            "tokens/s": statistics.median(one.rate for one in way),
            "over neither": str(rate) if way is ours else "",
            "CPU s a rollout": statistics.median(sum(one.cpu_s.values()) for one in way),
            "CPU over neither": str(cpu) if way is ours else "",
            **{
                f"CPU s, {part}": statistics.median(one.cpu_s[part] for one in way)
                for part in way[0].cpu_s
            },
            "tokens a rollout": statistics.median(one.tokens for one in way),
            "sessions published": statistics.median(one.batches for one in way),
        }
        for name, way in turns.items()
    ]
    say(f"capture: CPU time {cpu}, tokens/s {rate}")
    equal = [one.hashes for one in ours] == [one.hashes for one in theirs]
    goals = [
        cost_goal(
            "CPU time with capture and publication over neither", CAPTURE_GOAL, cpu, FEWEST_PAIRS
        ),
        Goal("tokens with and without capture equal (1: yes)", 1.0, float(equal), equal),
    ]
    return Findings(rows, goals)
