"""Measures a run with many sessions at once, through one gateway with the scripted engine and a
durable Redis.

External agents all have a task, a connection and a turn under way. The bench acts as the
coordinator: it offers the tasks, and counts the results in Redis.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gateway.agents import CrowdOrder, What
from benchmarks.gateway.backends import MODEL, ScriptPace, texts
from benchmarks.gateway.fronts import Front, gateway
from benchmarks.processes import Cost, Meter, child, redis_server
from benchmarks.result import Goal, Row, say
from paceline.config import SecurityConfig
from paceline.errors import InternalError
from paceline.local.ports import free_port
from paceline.rpc import channel, leased
from paceline.streams import connect, run_key
from paceline.v1 import rollout_pb2 as rpb
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub
from paceline.v1.trajectory_pb2 import PURPOSE_TRAIN, SamplingParams

AGENTS = "benchmarks.gateway.agents"
RUN = "bench"
SAMPLES = 8
"""Agents per task, if the number of agents is a multiple."""
DEADLINE_S = 1200.0
LOOK_EVERY_S = 0.1
SECTION = "sessions at once"


@dataclass(frozen=True, slots=True)
class CrowdPart:
    """Result of a part that all agents have done."""

    told: Mapping[str, Any]  # by agents.Crowd
    cost: Cost  # of the gateway
    kib: float  # the gateway's added memory per session


@dataclass(frozen=True, slots=True)
class Crowded:
    """Results for one number of sessions."""

    sessions: int
    turns: int
    claim: CrowdPart
    talk: CrowdPart
    complete: CrowdPart
    redis_kib: float  # of a session with its trajectory
    kept_s: float  # from the last end to the last trajectory in Redis
    scored: int  # samples reported to the run


async def measure_at_once(
    counts: Sequence[int],
    turns: int,
    pace: ScriptPace,
    files: tuple[Path, Path, Path],
    settings: Sequence[str],
) -> list[Crowded]:
    """Measures each number of sessions with its own gateway and Redis. `files`: folder, model,
    script.
    """
    found = []
    for count in counts:
        say(f"{count} sessions at once, {turns} turns each")
        found.append(await _measure(count, turns, pace, files, settings))
    return found


async def _measure(
    count: int,
    turns: int,
    pace: ScriptPace,
    files: tuple[Path, Path, Path],
    settings: Sequence[str],
) -> Crowded:
    async with AsyncExitStack() as stack:
        url, redis_pid = await redis_server(stack, "durable")
        address = f"127.0.0.1:{free_port()}"
        own = (*_settings(count, url), f"addresses.gateway={address}", *settings)
        front = await stack.enter_async_context(gateway(*files, own))
        crowd = await stack.enter_async_context(child(AGENTS))
        offered = asyncio.create_task(_offer(address, count, pace))
        stack.callback(offered.cancel)
        watch = _Watch(front, redis_pid)

        async def do(what: What) -> CrowdPart:
            meter = Meter(front.pid)
            part = CrowdOrder(what, front.port, MODEL, texts(pace), pace.most_tokens, count, turns)
            crowd.tell(**asdict(part))
            told = await crowd.answer(DEADLINE_S)
            if told["wrong"] or told["agents"] != count:
                raise InternalError(f"{what} went wrong", seen=told)
            return CrowdPart(told, meter.read(), watch.gateway_kib() / count)

        claim, talk, complete = await do("claim"), await do("turns"), await do("complete")
        scored, kept_s = await offered, await _until_kept(url, count)
        of_redis = watch.redis_kib() / count
        return Crowded(count, turns, claim, talk, complete, of_redis, kept_s, scored)


def _settings(count: int, url: str) -> tuple[str, ...]:
    return (
        "trajectories=true",
        f'redis.durable_url="{url}"',
        f"run.id={RUN}",
        f"queue.limit={count}",  # all sessions may wait at once
        f"queue.wait_s={DEADLINE_S}",
    )


class _Watch:
    """Memory of gateway and Redis beyond their memory at the start."""

    def __init__(self, front: Front, redis_pid: int) -> None:
        self._gateway, self._redis = psutil.Process(front.pid), psutil.Process(redis_pid)
        self._before = self._kib(self._gateway), self._kib(self._redis)

    def gateway_kib(self) -> float:
        return self._kib(self._gateway) - self._before[0]

    def redis_kib(self) -> float:
        return self._kib(self._redis) - self._before[1]

    @staticmethod
    def _kib(process: psutil.Process) -> float:
        return float(process.memory_info().rss) / 1024


async def _until_kept(url: str, count: int) -> float:
    """Seconds until every session has a trajectory in Redis, appended with its ledger entry."""
    began = time.perf_counter()
    async with connect(url) as client, asyncio.timeout(DEADLINE_S):
        for _ in itertools.count():
            if await client.xlen(run_key(RUN, "trajectories")) >= count:
                break
            await asyncio.sleep(LOOK_EVERY_S)
    return time.perf_counter() - began


async def _offer(address: str, count: int, pace: ScriptPace) -> int:
    """Lets the gateway offer `count` samples; returns the number scored when all have ended."""
    security = SecurityConfig(token_env="", run_tokens=False)
    samples = math.gcd(count, SAMPLES)
    request = rpb.RunTasksRequest(
        context=leased(security, RUN, 0, 1),
        purpose=PURPOSE_TRAIN,
        tasks=[
            rpb.TaskSpec(task_id=f"t{n}", prompt=f"bench {n}", group_id=f"s0.t{n}", task_index=n)
            for n in range(count // samples)
        ],
        samples_per_task=samples,
        sampling=SamplingParams(temperature=1.0, max_tokens=pace.most_tokens),
        run_seed=7,
        environment="external",
        reward="agent",
    )
    async with channel(address, security) as connection:
        stub: Any = RolloutServiceStub(connection)
        async for news in stub.RunTasks(request, timeout=DEADLINE_S):
            if news.HasField("finished"):
                return int(news.finished.scored)
    raise InternalError("the gateway did not report the end of the tasks")


def at_once_rows(found: Sequence[Crowded]) -> list[Row]:
    """Makes two rows for each number of sessions: speed and cost."""
    return [*map(_speed, found), *map(_cost, found)]


def _speed(one: Crowded) -> Row:
    talk = one.talk.told
    return {
        "section": SECTION,
        "sessions": one.sessions,
        "claims/s": one.sessions / one.claim.told["seconds"],
        "turns/s": talk["turns"] / talk["seconds"],
        "turn p50 ms": talk["turn_p50_ms"],
        "turn p99 ms": talk["turn_p99_ms"],
        "first p50 ms": talk["first_p50_ms"],
        "first p99 ms": talk["first_p99_ms"],
        "ends/s": one.sessions / one.complete.told["seconds"],
        "all in Redis after s": one.kept_s,
        "agents' core": f"{talk['load_cpu_share']:.0%}",
    }


def _cost(one: Crowded) -> Row:
    return {
        "section": f"{SECTION}, their cost",
        "sessions": one.sessions,
        "CPU ms/claim": 1e3 * one.claim.cost.cpu_s / one.sessions,
        "CPU ms/turn": 1e3 * one.talk.cost.cpu_s / one.talk.told["turns"],
        "KiB a session": one.claim.kib,
        "KiB after its turns": one.talk.kib,
        "peak MiB": one.talk.cost.peak_rss_mib,
        "Redis KiB a session": one.redis_kib,
    }


def at_once_goals(found: Sequence[Crowded]) -> list[Goal]:
    """Goal that every session ends as a trajectory that is reported to the run."""
    if not found:
        return []
    share = min(one.scored / one.sessions for one in found)
    name = "share of sessions at once with a trajectory in Redis and an end reported to the run"
    return [Goal(name, 1.0, share, share == 1)]
