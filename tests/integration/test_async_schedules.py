"""Asynchronous schedules of the coordinator in both placements, against scripted peers over real
gRPC sockets and a real Redis.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any, cast

import pytest
from integration.coordinator_world import (
    WAIT_S,
    Peers,
    Script,
    config_of,
    journal_of,
    overrides,
    process_of,
    records_of,
    run_to_end,
    running_peers,
)
from slot_overlaps import overlaps

from paceline.messages import versions_to_proto
from paceline.report.journal import slot_intervals, step_windows
from paceline.services.coordinator.calls.base import Calls
from paceline.services.coordinator.calls.base import Peers as Channels
from paceline.services.coordinator.calls.weights import mend
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.services.coordinator.journal.journal import Journal
from paceline.services.coordinator.machine.commands import RunTasks
from paceline.services.coordinator.machine.schedule import groups_running
from paceline.services.coordinator.machine.settings import RunSettings, Schedule
from paceline.services.coordinator.machine.state import (
    State,
)
from paceline.services.coordinator.transitions import Transitions
from paceline.streams import connect
from paceline.trajectory import VersionSet

pytestmark = pytest.mark.timeout(90)

STEPS = 4
COLOCATED: dict[str, object] = {"placement": "colocated"}
APART: dict[str, object] = {"placement": "disaggregated", "learner_slots": 1}
PLACEMENTS = pytest.mark.parametrize("placement", [COLOCATED, APART], ids=["colocated", "apart"])


def words_of(
    peers: Peers, redis_url: str, directory: Path, placement: dict[str, object], **more: object
) -> list[str]:
    base = {"steps": STEPS, "heldout_path": "", "drafter_enabled": False}
    return overrides(peers, redis_url, directory, **{**base, **placement, **more})


def every_group_once(script: Script, lag: int, steps: int = STEPS) -> None:
    """Each group of each step was trained once, and not too late."""
    batches = dict(script.waited_for)  # a step that was requested twice is trained once
    assert sorted(batches) == list(range(steps))
    groups = sorted(group for batch in batches.values() for group in batch)
    assert groups == sorted(f"s{step}.t{task}" for step in range(steps) for task in range(2))
    for step, batch in batches.items():
        drawn = {int(group[1:].split(".")[0]) for group in batch}
        assert all(0 <= script.trained_from[step] - script.drawn_at[one] <= lag for one in drawn)


async def slots_are_held_by_one(config: CoordinatorConfig) -> list[dict[str, Any]]:
    entries = await journal_of(config)
    assert overlaps(slot_intervals(entries)) == []
    windows = step_windows(entries)
    for record, window in zip(records_of(entries), windows, strict=True):
        slots = 2 + config.learner_slots
        wall_s = slots * (window.end_s - window.start_s)
        assert sum(record["slot_s"].values()) == pytest.approx(wall_s)
    return entries


@PLACEMENTS
async def test_one_step_off_rolls_a_step_out_while_the_one_before_goes_to_the_gateway(
    redis_url: str, tmp_path: Path, placement: dict[str, object]
) -> None:
    script = Script(bubbles=False, push_waits=True, one_version=True)
    script.drawn_at[STEPS] = 0  # the last push has no rollouts to wait for
    script.disaggregated = placement is APART
    async with running_peers(script) as peers:
        config = config_of(words_of(peers, redis_url, tmp_path, placement, schedule="one_step_off"))
        await run_to_end(config)
    every_group_once(script, lag=1)
    assert [script.trained_from[step] - script.drawn_at[step] for step in range(STEPS)] == [
        *(0, 1, 1, 1),
    ]
    await slots_are_held_by_one(config)


@PLACEMENTS
async def test_fully_async_commits_among_rollouts_and_trains_every_group_once(
    redis_url: str, tmp_path: Path, placement: dict[str, object]
) -> None:
    script = Script(bubbles=False, rollout_waits=True)
    script.disaggregated = placement is APART
    async with running_peers(script) as peers:
        words = words_of(peers, redis_url, tmp_path, placement, schedule="fully_async")
        config = config_of([*words, "max_policy_lag=2", "commit_mode=retract"])
        await run_to_end(config)
    every_group_once(script, lag=2)
    entries = await slots_are_held_by_one(config)
    assert [
        entry["data"]["versions"]["policy"] for entry in entries if entry["event"] == ("Committed")
    ] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("schedule", "placement"),
    [("one_step_off", COLOCATED), ("one_step_off", APART), ("fully_async", APART)],
    ids=["one_step_off-colocated", "one_step_off-apart", "fully_async-apart"],
)  # in fully_async, colocated, nothing is rolled out while the trainer is ahead
async def test_a_policy_that_is_damaged_when_the_trainer_is_ahead_gives_way_to_the_next_one(
    redis_url: str, tmp_path: Path, schedule: str, placement: dict[str, object]
) -> None:
    script = Script(bubbles=False, policy_gone=True, one_version=schedule == "one_step_off")
    script.disaggregated = placement is APART
    async with running_peers(script) as peers:
        config = config_of(words_of(peers, redis_url, tmp_path, placement, schedule=schedule))
        await run_to_end(config)
    every_group_once(script, lag=1)
    assert script.drawn_at[2] == 2  # p1 is gone
    entries = await slots_are_held_by_one(config)
    assert [entry["event"] for entry in entries].count("SetDamaged") == 1
    assert [policy for _, policy, _ in script.commits] == [1, 2, 3, 4]


@pytest.mark.parametrize("committing", [False, True])
async def test_a_newer_set_at_a_gateway_stays_only_if_the_run_commits_it(
    redis_url: str, tmp_path: Path, committing: bool
) -> None:
    unused, newer = cast(Any, None), VersionSet(seq=2)
    state = State(
        settings=RunSettings(schedule=Schedule.FULLY_ASYNC),
        versions=VersionSet(seq=1),
        committing=newer if committing else None,
    )
    async with running_peers(script := Script()) as peers:
        script.serving["gateway"] = versions_to_proto(newer)
        config = config_of(words_of(peers, redis_url, tmp_path, APART, schedule="fully_async"))
        channels = Channels(config.addresses, config.security)
        try:
            calls = Calls(config, channels, unused, unused, unused, lambda: 0.0, lambda: state)
            await mend(calls, RunTasks(0, 1, state.versions))
        finally:
            await channels.close()
    assert [seq for seq, _, _ in script.commits] == ([] if committing else [1])


@pytest.mark.slow
@pytest.mark.parametrize("snapshot_entries", [1, 1000])
async def test_a_killed_coordinator_takes_an_asynchronous_run_up_again(
    redis_url: str, tmp_path: Path, snapshot_entries: int
) -> None:
    script = Script(bubbles=False, hold_step=2, disaggregated=True)
    async with running_peers(script) as peers:
        words = words_of(peers, redis_url, tmp_path, APART, schedule="fully_async")
        first = await process_of(words, snapshot_entries)
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        await script.until(lambda: 3 in script.drawn_at)
        first.send_signal(signal.SIGKILL)
        await first.wait()
        await counters_are_seeded_from_the_journal(config_of(words))
        script.released.set()
        second = await process_of(words, snapshot_entries)
        assert await asyncio.wait_for(second.wait(), WAIT_S) == 0
    every_group_once(script, lag=1)
    assert len(records_of(await journal_of(config_of(words)))) == STEPS


async def counters_are_seeded_from_the_journal(config: CoordinatorConfig) -> None:
    """Steps 2 and 3 are rolled out, and 0 and 1 are trained."""
    client = connect(config.redis.durable_url)
    replay = Transitions(config.run.id, 4, 0.0, 1000, Journal(client, config.run.id), _nobody)
    await replay.replay()
    await client.aclose()
    state = replay.state
    assert (state.step, state.versions.policy) == (2, 2)
    assert state.rollouts.step == 4
    assert groups_running(state) in (2, 4)


async def _nobody(*facts: object) -> None:
    """Nobody listens."""
