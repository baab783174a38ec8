"""Measures the coordinator alone: events applied (machine, records, journal, facts) a second, how
long a decision takes, and what it writes.

Journal and facts are real: a Redis server as a run starts it, and a subscriber that is a process of
its own and reads once a second. A decision's latency runs from the event to the subscriber's answer
to the decision's fact; beside each the same answer to a bare ZeroMQ message of the same size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

from benchmarks.growth_coordinator import SNAPSHOT_ENTRIES
from benchmarks.options import above_zero, counts
from benchmarks.processes import BenchChild, child, redis_server
from benchmarks.result import BenchResult, Goal, Row, at_least, say
from coordinator.journal.journal import Journal
from coordinator.machine import events
from coordinator.machine.events import Event
from coordinator.machine.state import RunSettings, State
from coordinator.transitions import Transitions
from paceline.events import FactPublisher
from paceline.streams import connect, run_key
from paceline.streams.journal_line import unpack_entry
from paceline.telemetry.log import configure_log
from paceline.trajectory import VersionSet
from paceline.v1.coordinator_pb2 import Fact

EVENTS_GOAL, LATENCY_GOAL = 5000.0, 3.0
LISTENERS = "benchmarks.listeners"
SHARES_PER_LEASE = 8
"""The drafter is done after so many shares, and gets the next slots."""
STEPS = 1_000_000


@dataclass(slots=True)
class TimedRedis:
    """A client that knows how long its appends took."""

    client: Any
    append_s: float = 0.0

    async def xadd(self, *args: Any, **kwargs: Any) -> Any:
        """As the client's."""
        began = time.perf_counter()
        answer = await self.client.xadd(*args, **kwargs)
        self.append_s += time.perf_counter() - began
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


@dataclass(slots=True)
class Bench:
    """One run's transitions with all that they write to."""

    transitions: Transitions
    redis: TimedRedis
    run_id: str
    facts: FactPublisher
    told: int = 0  # facts

    async def publish(self, fact: Fact) -> None:
        """Counts the facts."""
        self.told += 1
        await self.facts.publish(fact)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--slots", type=counts, default=(8, 64, 512, 4096), help="slots of a run")
    parser.add_argument(
        "--events", type=above_zero(int), default=9000, help="events of a run, whole steps"
    )
    parser.add_argument("--repeats", type=above_zero(int), default=5, help="runs; medians count")
    parser.add_argument(
        "--decisions", type=above_zero(int), default=4000, help="decisions timed one by one"
    )


async def run(options: argparse.Namespace) -> BenchResult:
    """Both parts at every number of slots."""
    configure_log("bench", "warning", True)
    rates: list[Row] = []
    latencies: list[Row] = []
    for slots in options.slots:
        runs = [await _rate(slots, options.events) for _ in range(options.repeats)]
        rates.append({name: _middle([one[name] for one in runs]) for name in runs[0]})
        say(str(rates[-1]))
        latencies.append(await _latency(slots, options.decisions))
        say(str(latencies[-1]))
    rows = [{"section": "events", **row} for row in rates]
    rows += [{"section": "latency of a decision, ms", **row} for row in latencies]
    return BenchResult("coordinator", rows, _goals(rates[-1], latencies[-1]))


def _goals(rate: Row, latency: Row) -> list[Goal]:
    def at_most(name: str, goal: float, value: str | float | int | None) -> Goal:
        return at_least(f"minus {name}", -goal, -float(value or 0))

    slots = rate["slots"]
    return [
        at_least(
            f"events/s at {slots} slots, Redis apart", EVENTS_GOAL, float(rate["Redis apart"] or 0)
        ),
        at_most("bytes of journal an event beyond its details", 100, rate["bytes beyond details"]),
        at_most("facts missed by who reads once a second", 0, rate["missed facts"]),
        at_most("p99 over a bare round trip", LATENCY_GOAL, latency["whole/bare p99"]),
        at_most("p99 over it, Redis apart", LATENCY_GOAL, latency["apart/bare p99"]),
    ]


async def _rate(slots: int, wanted: int) -> dict[str, float]:
    """One run of whole steps, as fast as it goes."""
    async with AsyncExitStack() as stack:
        bench = await _bench(stack, slots)
        listener = await stack.enter_async_context(
            child(LISTENERS, "slow", bench.facts.address, bench.run_id)
        )
        await listener.answer()
        await _spoken_to(bench, listener)
        await bench.transitions.apply(_started(slots))
        count = steps = 0
        bench.told, bench.redis.append_s = 0, 0.0
        began = time.perf_counter()
        while count < wanted:
            for event in one_step(bench.transitions):
                await bench.transitions.apply(event)
                count += 1
            steps += 1
        wall_s = time.perf_counter() - began
        listener.tell(last=await bench.facts.publish(Fact()))
        heard = await _spoken_to(bench, listener)
        beyond, whole = await _journal_bytes(bench)
        return {
            "slots": slots,
            "events/s": count / wall_s,
            "Redis apart": count / (wall_s - bench.redis.append_s),
            "us in Redis": 1e6 * bench.redis.append_s / count,
            "events a step": count / steps,
            "facts a step": bench.told / steps,
            "bytes beyond details": beyond,
            "journal KB a step": whole / steps / 1e3,
            "missed facts": heard["missed"],
        }


async def _latency(slots: int, decisions: int) -> Row:
    """Decisions one by one, each beside a bare round trip."""
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
        await bench.transitions.apply(_started(slots))
        await answers.recv()
        times: dict[str, list[float]] = {"bare": [], "decision": [], "Redis apart": []}
        while len(times["decision"]) < decisions:
            for event in one_step(bench.transitions):
                began = time.perf_counter()
                await bare.send_multipart(message)
                await answers.recv()
                times["bare"].append(time.perf_counter() - began)
                told, bench.redis.append_s = bench.told, 0.0
                began = time.perf_counter()
                await bench.transitions.apply(event)
                if bench.told == told:  # no fact, no answer
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

    async def publish(fact: Fact) -> None:
        await bench.publish(fact)

    journal = Journal(client, run_id)  # type: ignore[arg-type]  # a client with a watch
    transitions = Transitions(run_id, 8 * slots, 0.3, SNAPSHOT_ENTRIES, journal, publish)
    bench = Bench(transitions, client, run_id, facts)
    return bench


async def _spoken_to(bench: Bench, listener: BenchChild) -> Mapping[str, Any]:
    """What a listener answers once it has heard something."""
    answer = asyncio.create_task(listener.answer())
    while not answer.done():
        await bench.facts.publish(Fact())
        await asyncio.wait({answer}, timeout=0.02)
    return answer.result()


async def _journal_bytes(bench: Bench) -> tuple[float, int]:
    """Bytes an entry beyond its details, and bytes of all entries."""
    beyond: list[int] = []
    whole = 0
    async for line in _lines(bench):
        details = unpack_entry(line)["data"].get("details")
        beyond.append(len(line) - (len(json.dumps(details)) if details else 0))
        whole += len(line)
    return statistics.mean(beyond), whole


async def _lines(bench: Bench) -> AsyncIterator[bytes]:
    last = "-"
    while page := await bench.redis.xrange(run_key(bench.run_id, "journal"), last, "+", 1000):
        for entry_id, fields in page:
            yield fields[b"entry"]
            last = f"({entry_id.decode()}"


def _started(slots: int) -> Event:
    settings = RunSettings(workers=slots, total_steps=STEPS, training_interval_steps=1)
    return events.RunStarted(_now(), settings, VersionSet())


def one_step(run: Transitions) -> Iterator[Event]:
    """The events of a step, each made from the state that the one before has left."""

    def state() -> State:
        return run.state

    def lease() -> int:
        return state().lease_epoch

    yield events.StepBegan(_now(), state().step, f"00-{1:032x}-{1:016x}-01")
    epoch = state().phase_epoch
    for worker in range(state().settings.workers):
        yield events.ShareDone(_now(), epoch, worker)
        if state().lease is not None and worker % SHARES_PER_LEASE == SHARES_PER_LEASE - 1:
            yield events.Detached(_now(), lease(), "epochs", {"steps": 3, "tokens": 900})
    yield events.TasksFinished(_now(), epoch, {"response_tokens": 5000, "rollout_s": 2.0})
    if state().lease is not None:
        yield events.Preempted(_now(), lease())
    version = state().versions.policy + 1
    yield events.PolicyStepped(_now(), state().phase_epoch, version, {"loss": 0.5})
    yield events.PolicyPrepared(_now(), state().phase_epoch, version)
    committing = state().committing
    assert committing is not None
    yield events.Committed(_now(), committing)


def _now() -> float:
    return round(time.time(), 6)


def _middle(values: list[float]) -> float:
    middle = statistics.median(values)
    return int(middle) if middle == int(middle) else middle
