"""Measures what a long run leaves in the durable Redis: simulated sessions go through ledger and
stream, and a coordinator's events into its journal, checkpoint by checkpoint, in a server that is
durable as a run's is. Then times the replay.

Nothing is generated and nothing trained. The server's own figure of its memory counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import redis.asyncio

from benchmarks.growth_coordinator import JournaledRun, replayed
from benchmarks.options import above_zero
from benchmarks.processes import redis_server
from benchmarks.result import BenchResult, Row, say
from paceline.streams import Ledger, RedisStream, connect, encode_trajectory, run_key
from paceline.telemetry.log import configure_log
from paceline.trajectory import BranchKey, Trajectory, VersionSpan
from policy_trainer.batches.batcher import CONSUMER, GROUP
from policy_trainer.config import PolicyTrainerConfig

TOKENS = 64
"""Of a trajectory. Its entry is deleted when two checkpoints hold its step, however long it is."""
LOOKS = 10
_DELIVER = """
-- KEYS: stream. ARGV: group, consumer, entries. Delivers them, and returns their ids alone.
local reply = redis.call(
  'XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', ARGV[3], 'STREAMS', KEYS[1], '>')
local ids = {}
for _, entry in ipairs(reply[1][2]) do ids[#ids + 1] = entry[1] end
return ids
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the bench."""
    parser.add_argument("--steps", type=above_zero(int), default=10_000, help="RL steps")
    parser.add_argument("--sessions", type=above_zero(int), default=512, help="sessions of a step")


async def run(options: argparse.Namespace) -> BenchResult:
    """Durable memory ten times on the way, then the replay."""
    configure_log("bench", "warning", True)
    rows: list[Row] = []
    every = max(1, options.steps // LOOKS)
    steps = options.steps
    async with AsyncExitStack() as stack:
        url, _ = await redis_server(stack, "durable")
        client = await stack.enter_async_context(connect(url))
        started = time.monotonic()
        course = JournaledRun(client, "bench", steps)
        async for step in simulate(client, "bench", steps, options.sessions, course):
            if (step + 1) % every == 0:
                rows.append(await _look(client, step + 1, time.monotonic() - started))
                say(str(rows[-1]))
        quick_s = await replayed(client, "bench", course)
        await client.delete(run_key("bench", "journal:snapshot"))
        whole_s = await replayed(client, "bench", course)
    section = "replay by a coordinator"
    rows.append({"section": section, "from": "newest snapshot", "seconds": quick_s})
    rows.append({"section": section, "from": "first entry", "seconds": whole_s})
    return BenchResult(f"{steps} steps of {options.sessions} sessions", rows, [])


async def simulate(
    client: redis.asyncio.Redis, run_id: str, steps: int, sessions: int, course: JournaledRun
) -> AsyncIterator[int]:
    """A run as gateway and coordinator write it and the policy trainer takes it, with the trainer's
    default intervals; yields the number of each step that is over.
    """
    defaults = PolicyTrainerConfig()
    interval = defaults.checkpoint_interval_steps
    ledger = Ledger(client, run_id)
    stream = RedisStream(client, run_key(run_id, "trajectories"))
    deliver = client.register_script(_DELIVER)
    await stream.create_group(GROUP)
    waiting: list[list[str]] = []  # entries of each step that two checkpoints do not hold yet
    try:
        for step in range(steps):
            branches = await _append(client, run_id, step, sessions)
            ids = await deliver(keys=[stream.name], args=[GROUP, CONSUMER, sessions])
            await ledger.mark_trained(branches, step)
            waiting.append([one.decode() for one in ids])
            await course.step(sessions)
            if (step + 1) % interval == 0:
                for done in waiting[:-interval]:
                    await stream.ack(GROUP, done, delete=True)
                waiting = waiting[-interval:]
                await ledger.compact(step - interval - defaults.ledger_keep)
            yield step
    finally:
        await stream.close()


async def _append(client: redis.asyncio.Redis, run_id: str, step: int, sessions: int) -> list[str]:
    """A step's final branches; returns their names."""
    one = _trajectory(run_id, step)
    header, payload = encode_trajectory(one)
    payload += "".join(header.values()).encode()  # in one field: half the time for the same bytes
    branches = []
    async with client.pipeline(transaction=False) as pipe:
        ledger = Ledger(pipe, run_id)
        for index in range(sessions):
            named = replace(one, key=BranchKey(run_id, f"{step}-task-{index}"))
            branches.append(str(named.key))
            await ledger.append_final(named, {}, payload)
        await pipe.execute()
    return branches


def _trajectory(run_id: str, step: int) -> Trajectory:
    prompt = TOKENS // 4
    return Trajectory(
        key=BranchKey(run_id, ""),
        step=step,
        task_id="task",
        group_id=f"{step}.0",
        group_size=8,
        task_index=0,
        sample_index=0,
        token_ids=tuple(range(TOKENS)),
        loss_mask=(0,) * prompt + (1,) * (TOKENS - prompt),
        behavior_logprobs=(-0.5,) * TOKENS,
        version_spans=(VersionSpan(prompt, TOKENS, step),),
        reward=1.0,
        seed=step,
        temperature=1.0,
    )


async def _look(client: redis.asyncio.Redis, steps: int, wall_s: float) -> Row:
    started = time.monotonic()
    count = await Ledger(client, "bench").count()
    count_s = time.monotonic() - started
    info = await client.info("memory")
    journal = await client.memory_usage(run_key("bench", "journal"), samples=0)
    disk = await client.info("persistence")
    return {
        "steps": steps,
        "sessions final": count.final,
        "trained": count.trained,
        "lost": count.lost,
        "Redis MB": info["used_memory"] / 1e6,
        "journal MB": (journal or 0) / 1e6,
        "its file MB": disk["aof_current_size"] / 1e6,
        "count ms": 1000 * count_s,
        "wall s": wall_s,
    }
