"""Measures the cost of tracing: gateways with the embedded engine and two workers of one thread
each answer the same requests in turns.

Traced: every span goes to a file, as in a run. Off: OTEL_TRACES_SAMPLER=always_off. None:
OTEL_SDK_DISABLED=true, which also disables metrics.

CPU time counts the gateway and its workers; other load on the machine changes it less than wall
time. CPU time may still vary by more than tracing costs. The bench therefore also measures the CPU
time of one span with its line in a file. It multiplies that time by the spans of a request and
divides it by the CPU time of a request.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from benchmarks.demo_runs import demo_folder
from benchmarks.gateway.fronts import Front, gateway_with
from benchmarks.gateway.load import median
from benchmarks.options import above_zero
from benchmarks.result import BenchResult, Row, at_most, cost_goal, paired_ratio, say
from paceline import telemetry
from paceline.config import TelemetryConfig
from paceline.errors import InternalError
from paceline.report.spans import read_spans
from paceline.telemetry import names

TRACED, OFF, NONE = "traced", "off", "none"
ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    TRACED: {},
    OFF: {"OTEL_TRACES_SAMPLER": "always_off"},
    NONE: {"OTEL_SDK_DISABLED": "true"},
}
GOAL = 1.01
"""Goal for the cost with tracing over the cost without."""
WORKERS = 2
REQUEST_DEADLINE_S = 300.0
SPANS_ALONE = 10_000


@dataclass(frozen=True, slots=True)
class TracedLoad:
    """Load of one gateway in one turn."""

    requests: int
    streams: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TracedTurn:
    """Times of a turn, and the generated texts."""

    cpu_s: float
    wall_s: float
    said: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    option = parser.add_argument
    option("--pairs", type=above_zero(int), default=12, help="turns of each gateway")
    option("--requests", type=above_zero(int), default=128, help="of a turn")
    option("--streams", type=above_zero(int), default=32, help="requests at once")
    option("--tokens", type=above_zero(int), default=128, help="of a response")


async def run(options: argparse.Namespace) -> BenchResult:
    """Starts the gateways, lets them take turns, and stops them.

    Raises InternalError if their texts differ, NotFound outside a clone.
    """
    load = TracedLoad(options.requests, options.streams, options.tokens)
    turns: dict[str, list[TracedTurn]] = {name: [] for name in ENVIRONMENTS}
    with TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        async with AsyncExitStack() as stack:
            fronts = {
                name: await stack.enter_async_context(
                    gateway_with(
                        folder, name, _settings(folder / name, load), (), environment=environment
                    )
                )
                for name, environment in ENVIRONMENTS.items()
            }
            orders = itertools.cycle(itertools.permutations(fronts))
            for pair in range(options.pairs + 1):
                say(f"turn {pair} of {options.pairs}" if pair else "warming up")
                found = {one: await _turn(fronts[one], load, pair) for one in next(orders)}
                _check_equal(found)
                for one, turn in found.items() if pair else ():
                    turns[one].append(turn)
        spans = sum(1 for _ in read_spans(folder / TRACED / "spans"))
        span_s = span_cpu_s(folder / "alone")
    return _result(turns, load, spans / (load.requests * (options.pairs + 1)), span_s)


def _settings(run_dir: Path, load: TracedLoad) -> dict[str, Any]:
    traced = run_dir.name == TRACED
    return {
        "model": str(demo_folder() / "policy_trained"),
        "engine.kind": "embedded",
        "engine.workers": WORKERS,
        "engine.threads": 1,
        "engine.max_batch": max(1, load.streams // WORKERS),
        "drafter": "off",
        "run.dir": str(run_dir),
        "telemetry.spans_dir": str(run_dir / "spans") if traced else "",
    }


async def _turn(front: Front, load: TracedLoad, pair: int) -> TracedTurn:
    numbers, said = iter(range(load.requests)), dict[int, str]()

    async def some(client: httpx.AsyncClient) -> None:
        for number in numbers:
            said[number] = await _one(client, load, pair * load.requests + number)

    async with httpx.AsyncClient(base_url=front.url, timeout=REQUEST_DEADLINE_S) as client:
        cpu_s, began = _cpu_s(front.pid), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(load.streams):
                group.create_task(some(client))
        wall_s = time.perf_counter() - began
    texts = tuple(said[number] for number in range(load.requests))
    return TracedTurn(_cpu_s(front.pid) - cpu_s, wall_s, texts)


async def _one(client: httpx.AsyncClient, load: TracedLoad, seed: int) -> str:
    """Requests one completion below a span of the caller; returns its text.

    Raises InternalError for an error response.
    """
    body = {
        "prompt": f"{seed:04}:36=",
        "max_tokens": load.tokens,
        "seed": seed,
        "ignore_eos": True,
    }
    trace = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
    answer = await client.post("/v1/completions", json=body, headers={"traceparent": trace})
    if answer.status_code != httpx.codes.OK:
        raise InternalError("a request was refused", seen=answer.text[:300])
    return str(answer.json()["choices"][0]["text"])


def _cpu_s(pid: int) -> float:
    """CPU seconds so far of a process and its descendants, the engine workers."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def _check_equal(found: Mapping[str, TracedTurn]) -> None:
    if len({turn.said for turn in found.values()}) != 1:
        raise InternalError("gateways that differ only in tracing gave different texts")


def span_cpu_s(folder: Path) -> float:
    """CPU seconds of a span with the attributes of a stage, its line in the file included."""
    telemetry.setup("bench", TelemetryConfig(spans_dir=str(folder), log_level="error"))
    about: telemetry.Attributes = {
        names.WORKER: 0,
        names.TOKENS: 7,
        names.BUSY_S: 0.1,
        names.ARM: "off",
    }
    began = time.process_time()
    for number in range(SPANS_ALONE):
        with telemetry.span(names.ENGINE_REQUEST, about):
            pass
        if number % 100 == 0:
            time.sleep(0.001)  # gives the writer time, as a gateway does that waits for its engine
    telemetry.shutdown()
    return (time.process_time() - began) / SPANS_ALONE


def _result(
    turns: Mapping[str, Sequence[TracedTurn]], load: TracedLoad, spans: float, span_s: float
) -> BenchResult:
    rows: list[Row] = [
        {
            "gateway": name,
            "CPU s a turn": median(turn.cpu_s for turn in each),
            "s a turn": median(turn.wall_s for turn in each),
            "spans a request": spans if name == TRACED else 0.0,
        }
        for name, each in turns.items()
    ]
    goals = []
    for name in (OFF, NONE):
        cpu = paired_ratio(*([turn.cpu_s for turn in turns[one]] for one in (TRACED, name)))
        wall = paired_ratio(*([turn.wall_s for turn in turns[one]] for one in (TRACED, name)))
        rows.append(
            {"gateway": f"{TRACED} / {name}", "CPU s a turn": cpu.value, "s a turn": wall.value}
        )
        goals.append(cost_goal(f"CPU time, {TRACED} over {name}", GOAL, cpu))
    turn_s = median(turn.cpu_s for turn in turns[NONE]) or 1.0
    share = spans * span_s * load.requests / turn_s
    rows.append({"gateway": "its spans alone", "CPU s a turn": spans * span_s * load.requests})
    goals.append(at_most("CPU time of a request's spans over that of the request", 0.01, share))
    title = (
        f"cost of tracing, embedded engine, {load.requests} requests a turn, {load.streams} at "
        f"once, {load.tokens} tokens each"
    )
    return BenchResult(title, rows, goals)
