"""Measures the coordinator alone: events per second, time of a decision, and written bytes.

An event passes the machine, the records, the journal and the facts. The bench applies events one by
one, and together with all waiting events.

Journal and facts are real: a Redis server as in a run, and a subscriber process that reads once a
second. A decision's latency lasts from the event to the subscriber's answer to the decision's fact.
The bench compares it with the answer to a bare ZeroMQ message of the same size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import zmq
import zmq.asyncio
from redis.commands.core import AsyncScript

from benchmarks.coordinator_events import one_step, run_started
from benchmarks.growth_coordinator import SNAPSHOT_ENTRIES
from benchmarks.options import above_zero, counts
from benchmarks.processes import BenchChild, child, redis_server
from benchmarks.result import BenchResult, Goal, Row, at_least, at_most, say
from benchmarks.simulation.sections import simulated
from paceline.events import FactPublisher
from paceline.services.coordinator.journal.journal import TOGETHER, Journal
from paceline.services.coordinator.transitions import Transitions
from paceline.streams import connect
from paceline.streams.journal import journal_lines, unpack_entry
from paceline.telemetry.log import configure_log
from paceline.v1.coordinator_pb2 import Fact

EVENTS_GOAL, LATENCY_GOAL = 5000.0, 3.0
LISTENERS = "benchmarks.listeners"
MEASURED, SIMULATED = PARTS = "decisions", "simulation"


@dataclass(slots=True)
class TimedRedis:
    """A Redis client that sums the seconds of its appends."""

    client: Any
    append_s: float = 0.0

    def register_script(self, script: str) -> AsyncScript:
        """Registers a script that runs through this object, so that its calls are timed."""
        return AsyncScript(self, script)  # type: ignore[arg-type]  # a client with a watch

    async def evalsha(self, *args: Any) -> Any:
        """Runs a script and adds its seconds to `append_s`."""
        began = time.perf_counter()
        answer = await self.client.evalsha(*args)
        self.append_s += time.perf_counter() - began
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


@dataclass(slots=True)
class Bench:
    """The transitions of one run, with its Redis client and its publisher of facts."""

    transitions: Transitions
    redis: TimedRedis
    run_id: str
    facts: FactPublisher
    told: int = 0  # facts published

    async def publish(self, *facts: Fact) -> None:
        """Counts and publishes facts."""
        self.told += len(facts)
        await self.facts.publish(*facts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--slots", type=counts, default=(8, 64, 512, 4096), help="slots of a run")
    parser.add_argument(
        "--events", type=above_zero(int), default=9000, help="events of a run, whole steps"
    )
    parser.add_argument("--repeats", type=above_zero(int), default=5, help="runs; medians count")
    parser.add_argument("--steps", type=above_zero(int), default=40, help="of a simulated run")
    parser.add_argument(
        "--only", choices=PARTS, nargs="+", default=PARTS, help="parts to run; all unless named"
    )
    parser.add_argument(
        "--decisions", type=above_zero(int), default=4000, help="decisions timed one by one"
    )


async def run(options: argparse.Namespace) -> BenchResult:
    """Runs the selected parts: measurements at every number of slots, then the simulation."""
    configure_log("bench", "warning", True)
    rates: list[Row] = []
    latencies: list[Row] = []
    for slots in options.slots if MEASURED in options.only else ():
        for at_once in (1, TOGETHER):
            runs = [await _rate(slots, options.events, at_once) for _ in range(options.repeats)]
            rates.append({name: _middle([one[name] for one in runs]) for name in runs[0]})
            say(str(rates[-1]))
        latencies.append(await _latency(slots, options.decisions))
        say(str(latencies[-1]))
    rows: list[Row] = [{"section": "events", **row} for row in rates]
    rows += [{"section": "latency of a decision, ms", **row} for row in latencies]
    goals = _goals(rates[-1], latencies[-1]) if rates else []
    if SIMULATED in options.only:
        found, reached = simulated(options.steps)
        rows += found
        goals += reached
    return BenchResult("coordinator", rows, goals)


def _goals(rate: Row, latency: Row) -> list[Goal]:
    def found(row: Row, name: str) -> float:
        return float(row[name] or 0)

    slots = rate["slots"]
    return [
        at_least(
            f"events/s at {slots} slots, {TOGETHER} at once",
            EVENTS_GOAL,
            found(rate, "events/s"),
        ),
        at_most(
            "bytes of journal an event beyond its details", 100, found(rate, "bytes beyond details")
        ),
        at_most("facts missed by a reader once a second", 0, found(rate, "missed facts")),
        at_most("p99 over a bare round trip", LATENCY_GOAL, found(latency, "whole/bare p99")),
        at_most("p99 over it, Redis apart", LATENCY_GOAL, found(latency, "apart/bare p99")),
    ]


async def _rate(slots: int, wanted: int, at_once: int) -> dict[str, float]:
    """Applies whole steps at full speed; returns the figures of the run."""
    async with AsyncExitStack() as stack:
        bench = await _bench(stack, slots)
        listener = await stack.enter_async_context(
            child(LISTENERS, "slow", bench.facts.address, bench.run_id)
        )
        await listener.answer()
        await _spoken_to(bench, listener)
        await bench.transitions.apply(run_started(slots))
        count = steps = 0
        bench.told, bench.redis.append_s = 0, 0.0
        began, worked = time.perf_counter(), time.thread_time()
        while count < wanted:
            for waiting in one_step(bench.transitions, at_once):
                await bench.transitions.apply(*waiting)
                count += len(waiting)
            steps += 1
        wall_s, cpu_s = time.perf_counter() - began, time.thread_time() - worked
        listener.tell(last=await bench.facts.publish(Fact()))
        heard = await _spoken_to(bench, listener)
        beyond, whole = await _journal_bytes(bench)
        return {
            "slots": slots,
            "at once": at_once,
            "events/s": count / wall_s,
            "Redis apart": count / (wall_s - bench.redis.append_s),
            "by CPU": count / cpu_s,
            "us in Redis": 1e6 * bench.redis.append_s / count,
            "events a step": count / steps,
            "facts a step": bench.told / steps,
            "bytes beyond details": beyond,
            "journal KB a step": whole / steps / 1e3,
            "missed facts": heard["missed"],
        }


async def _latency(slots: int, decisions: int) -> Row:
    """Times decisions one by one, each beside a bare round trip."""
    async with AsyncExitStack() as stack:
        bench = await _bench(stack, slots)
        context = stack.enter_context(zmq.asyncio.Context())
        bare, answers = context.socket(zmq.PUB), context.socket(zmq.PULL)
        ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in (bare, answers)]
        addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
        listener = await stack.enter_async_context(
            child(LISTENERS, "echo", bench.facts.address, *addresses)
        )
        await listener.answer()
        message = [bench.run_id.encode(), b"", b"x" * 80]
        for publish in (lambda: bare.send_multipart(message), lambda: bench.facts.publish(Fact())):
            while not await answers.poll(50):
                await publish()
        while await answers.poll(200):
            await answers.recv()
        await bench.transitions.apply(run_started(slots))
        await answers.recv()
        times: dict[str, list[float]] = {"bare": [], "decision": [], "Redis apart": []}
        while len(times["decision"]) < decisions:
            for event in chain.from_iterable(one_step(bench.transitions)):
                began = time.perf_counter()
                await bare.send_multipart(message)
                await answers.recv()
                times["bare"].append(time.perf_counter() - began)
                told, bench.redis.append_s = bench.told, 0.0
                began = time.perf_counter()
                await bench.transitions.apply(event)
                if bench.told == told:  # without a fact there is no answer
                    continue
                await answers.recv()
                took_s = time.perf_counter() - began
                times["decision"].append(took_s)
                times["Redis apart"].append(took_s - bench.redis.append_s)
        return _latency_row(slots, times)


def _latency_row(slots: int, times: dict[str, list[float]]) -> Row:
    row: dict[str, float] = {"slots": slots, "decisions": len(times["decision"])}
    for name, seconds in times.items():
        for percent in (50, 99):
            row[f"{name} p{percent}"] = 1e3 * float(np.percentile(seconds, percent))
    for name, short in (("decision", "whole"), ("Redis apart", "apart")):
        for percent in (50, 99):
            row[f"{short}/bare p{percent}"] = row[f"{name} p{percent}"] / row[f"bare p{percent}"]
    return row


async def _bench(stack: AsyncExitStack, slots: int) -> Bench:
    url, _ = await redis_server(stack, "durable")
    client = TimedRedis(await stack.enter_async_context(connect(url)))
    run_id = f"bench-{slots}"
    facts = stack.enter_context(FactPublisher("tcp://127.0.0.1:*", run_id))

    async def publish(*facts: Fact) -> None:
        await bench.publish(*facts)

    journal = Journal(client, run_id)  # type: ignore[arg-type]  # a client with a watch
    transitions = Transitions(run_id, 8 * slots, 0.3, SNAPSHOT_ENTRIES, journal, publish)
    bench = Bench(transitions, client, run_id, facts)
    return bench


async def _spoken_to(bench: Bench, listener: BenchChild) -> Mapping[str, Any]:
    """Publishes facts until the listener answers; returns its answer."""
    answer = asyncio.create_task(listener.answer())
    while not answer.done():
        await bench.facts.publish(Fact())
        await asyncio.wait({answer}, timeout=0.02)
    return answer.result()


async def _journal_bytes(bench: Bench) -> tuple[float, int]:
    """Mean bytes of an entry without its details, and bytes of all entries."""
    beyond: list[int] = []
    whole = 0
    async for line in journal_lines(bench.redis.client, bench.run_id):
        details = unpack_entry(line)["data"].get("details")
        beyond.append(len(line) - (len(json.dumps(details)) if details else 0))
        whole += len(line)
    return statistics.mean(beyond), whole


def _middle(values: list[float]) -> float:
    middle = statistics.median(values)
    return int(middle) if middle == int(middle) else middle
