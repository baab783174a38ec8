"""Measures the memory that a long run leaves in the durable Redis, then times the replay.

Simulated sessions pass ledger and stream, and a coordinator's events pass its journal, checkpoint
by checkpoint. The server is as durable as a run's. Nothing is generated or trained. The ledger's
own script appends the sessions, one step per call. Memory is the server's own figure.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import redis.asyncio
from redis.commands.core import AsyncScript

from benchmarks.growth_coordinator import JournaledRun, replayed
from benchmarks.options import above_zero
from benchmarks.processes import redis_server
from benchmarks.result import BenchResult, Row, at_most, say
from paceline.services.policy_trainer.batches.batcher import CONSUMER, GROUP
from paceline.services.policy_trainer.config import PolicyTrainerConfig
from paceline.streams import Ledger, RedisStream, connect, encode_trajectory, run_key, scripts
from paceline.streams.journal import ARCHIVE, JOURNAL
from paceline.telemetry.log import configure_log
from paceline.trajectory import BranchKey, Trajectory, VersionSpan

TOKENS = 64
"""Tokens of a trajectory. Its entry is deleted once two checkpoints hold its step, regardless of
its length.
"""
LOOKS = 10
MEMORY_GOAL_MB, REPLAY_GOAL_S = 200.0, 5.0
_DELIVER = """
-- KEYS: stream. ARGV: group, consumer, entries. Delivers them, and returns their ids alone.
local reply = redis.call(
  'XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', ARGV[3], 'STREAMS', KEYS[1], '>')
local ids = {}
for _, entry in ipairs(reply[1][2]) do ids[#ids + 1] = entry[1] end
return ids
"""


_NAME = "BRANCH"
_APPEND_MANY = f"""
local function append(KEYS, ARGV)
{scripts.script("add", "append_final")}
end
-- ARGV: number of branches, their names, then the arguments of an append with a name to replace.
local count, first = tonumber(ARGV[1]), tonumber(ARGV[1]) + 2
for index = 2, count + 1 do
  local arguments = {{ARGV[index], (string.gsub(ARGV[first], '{_NAME}', ARGV[index]))}}
  for rest = first + 1, #ARGV do arguments[#arguments + 1] = ARGV[rest] end
  append(KEYS, arguments)
end
"""


class _Recorder:
    """Replaces a client and its scripts; records keys and arguments of the last call."""

    keys: Sequence[str] = ()
    args: Sequence[str | bytes | int] = ()

    def register_script(self, script: str) -> _Recorder:
        """Returns this object for every script."""
        return self

    async def __call__(self, keys: Sequence[str], args: Sequence[str | bytes | int]) -> int:
        """Records the call of a script."""
        self.keys, self.args = keys, args
        return 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the bench."""
    parser.add_argument("--steps", type=above_zero(int), default=10_000, help="RL steps")
    parser.add_argument("--sessions", type=above_zero(int), default=512, help="sessions of a step")


async def run(options: argparse.Namespace) -> BenchResult:
    """Samples durable memory ten times during the run, then times the replay."""
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
    most_mb = max(float(row["Redis MB"] or 0) for row in rows)
    goals = [
        at_most("MB of Redis", MEMORY_GOAL_MB, most_mb),
        at_most("seconds of a replay", REPLAY_GOAL_S, quick_s),
    ]
    rows.append({"section": section, "from": "newest snapshot", "seconds": quick_s})
    rows.append({"section": section, "from": "first entry", "seconds": whole_s})
    return BenchResult(f"{steps} steps of {options.sessions} sessions", rows, goals)


async def simulate(
    client: redis.asyncio.Redis, run_id: str, steps: int, sessions: int, course: JournaledRun
) -> AsyncIterator[int]:
    """Writes a run as gateway and coordinator do, and consumes it as the policy trainer does.

    Uses the trainer's default intervals. Yields the number of each finished step.
    """
    defaults = PolicyTrainerConfig()
    interval = defaults.checkpoint_interval_steps
    ledger = Ledger(client, run_id)
    stream = RedisStream(client, run_key(run_id, "trajectories"))
    deliver, append = client.register_script(_DELIVER), client.register_script(_APPEND_MANY)
    await stream.create_group(GROUP)
    waiting: list[list[str]] = []  # entries of each step that two checkpoints do not hold yet
    try:
        for step in range(steps):
            branches = await _append(append, run_id, step, sessions)
            ids = await deliver(keys=[stream.key], args=[GROUP, CONSUMER, sessions])
            await ledger.mark_trained(branches, step)
            waiting.append([one.decode() for one in ids])
            await course.step(sessions)
            if (step + 1) % interval == 0:
                for done in waiting[:-interval]:
                    await stream.ack(GROUP, done)
                waiting = waiting[-interval:]
                await ledger.compact(step - interval - defaults.ledger_keep)
            yield step
    finally:
        await stream.close()


async def _append(append: AsyncScript, run_id: str, step: int, sessions: int) -> list[str]:
    """Appends a step's final branches; returns their names."""
    one = _trajectory(run_id, step)
    header, payload = encode_trajectory(one)
    payload += "".join(header.values()).encode()  # one field takes half the time for the same bytes
    recorder = _Recorder()
    await Ledger(recorder, run_id).append_final(one, {}, payload)  # type: ignore[arg-type]
    name, record, *rest = recorder.args
    template = str(record).replace(str(name), _NAME)
    branches = [str(BranchKey(run_id, f"{step}-task-{index}")) for index in range(sessions)]
    await append(keys=recorder.keys, args=[sessions, *branches, template, *rest])
    return branches


def _trajectory(run_id: str, step: int) -> Trajectory:
    prompt = TOKENS // 4
    return Trajectory(
        key=BranchKey(run_id, "session"),
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
    journal, archive, records = [
        (await client.memory_usage(run_key("bench", name), samples=0) or 0) / 1e6
        for name in (JOURNAL, ARCHIVE, "journal:steps")
    ]
    disk = await client.info("persistence")
    return {
        "steps": steps,
        "sessions final": count.final,
        "trained": count.trained,
        "lost": count.lost,
        "Redis MB": info["used_memory"] / 1e6,
        "journal MB": journal,
        "archive MB": archive,
        "records MB": records,
        "its file MB": disk["aof_current_size"] / 1e6,
        "count ms": 1000 * count_s,
        "wall s": wall_s,
    }
