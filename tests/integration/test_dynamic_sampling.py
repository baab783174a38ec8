"""Runs of a real coordinator that replaces groups with equal rewards by other groups."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from integration.coordinator_world import (
    WAIT_S,
    Script,
    config_of,
    journal_of,
    overrides,
    process_of,
    records_of,
    run_to_end,
    running_peers,
)

from paceline.tasks import Task, write_tasks
from paceline.v1.trajectory_pb2 import PURPOSE_TRAIN

ROUNDS = {"steps": 1, "prompts_per_step": 2, "dynamic_sampling_rounds": 2}
EQUAL = frozenset({"s0.t1", "s0.r1.t1"})


def words_of(peers: object, redis_url: str, directory: Path, **more: object) -> list[str]:
    words = overrides(peers, redis_url, directory, **{**ROUNDS, **more})  # type: ignore[arg-type]
    tasks = [Task(f"t{i}", f"{i}+1=", str(i + 1)) for i in range(6)]
    write_tasks(directory / "train.jsonl", tasks)
    return words


def asked(script: Script) -> list[list[str]]:
    """Groups in the calls of step 0."""
    return [
        [task.group_id for task in request.tasks]
        for request in script.rollouts
        if request.purpose == PURPOSE_TRAIN
    ]


async def test_other_tasks_stand_in_until_the_batch_is_full(redis_url: str, tmp_path: Path) -> None:
    script = Script(equal=EQUAL, bubbles=False)
    async with running_peers(script) as peers:
        config = config_of(words_of(peers, redis_url, tmp_path))
        await run_to_end(config)
    assert asked(script) == [["s0.t0", "s0.t1"], ["s0.r1.t1"], ["s0.r2.t1"]]
    drawn = {
        task.task_id
        for request in script.rollouts
        if request.purpose == PURPOSE_TRAIN
        for task in request.tasks
    }
    assert len(drawn) == 4, "a task stands twice in the step"
    every = ("s0.t0", "s0.t1", "s0.r1.t1", "s0.r2.t1")
    assert script.waited_for == [(0, dict.fromkeys(every, 2))]
    assert script.left_out == [(0, ["s0.t1", "s0.r1.t1"])]
    (record,) = records_of(await journal_of(config))
    assert record["groups_left_out"] == 2
    assert record["response_tokens"] == str(7 * 2 * 4)
    assert record["rollout_s"] == pytest.approx(0.3)
    assert record["reward_mean"] == pytest.approx(0.25), "of the first round: 0 1 0 0"
    assert (record["drafted_rounds"], record["accept_length"]) == ("30", 2.5)
    assert record["arm_drafted_rounds"] == {"eagle:3_1_4": "30"}
    assert record["arm_round_tokens"] == {"eagle:3_1_4": "75"}


async def test_after_the_last_round_the_trainer_is_told_to_do_without(
    redis_url: str, tmp_path: Path
) -> None:
    script = Script(equal=EQUAL | {"s0.r2.t1"}, bubbles=False)
    async with running_peers(script) as peers:
        config = config_of(words_of(peers, redis_url, tmp_path))
        await run_to_end(config)
    assert script.left_out == [(0, ["s0.t1", "s0.r1.t1", "s0.r2.t1"])]
    assert records_of(await journal_of(config))[0]["groups_left_out"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("snapshot_entries", [1, 1000])
async def test_a_coordinator_killed_in_a_later_round_asks_for_that_round_again(
    redis_url: str, tmp_path: Path, snapshot_entries: int
) -> None:
    script = Script(
        equal=frozenset({"s1.t0", "s1.t1"}), bubbles=False, hold_step=1, hold_round="s1.r1"
    )
    async with running_peers(script) as peers:
        words = words_of(peers, redis_url, tmp_path, steps=2)
        first = await process_of(words, snapshot_entries)
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        first.send_signal(signal.SIGKILL)
        await first.wait()
        script.released.set()
        second = await process_of(words, snapshot_entries)
        assert await asyncio.wait_for(second.wait(), WAIT_S) == 0
    again = ["s1.r1.t0", "s1.r1.t1"]
    assert asked(script) == [["s0.t0", "s0.t1"], ["s1.t0", "s1.t1"], again, again]
    assert script.left_out == [(0, []), (1, ["s1.t0", "s1.t1"])]
