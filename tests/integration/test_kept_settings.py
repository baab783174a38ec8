"""A coordinator resumes a run only with equal values of the settings that its state depends on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from integration.coordinator_world import (
    WAIT_S,
    Script,
    config_of,
    journal_of,
    overrides,
    run_to_end,
    running_peers,
)

from paceline.errors import ConfigError
from paceline.services.coordinator.machine.settings import KEPT
from paceline.services.coordinator.server import serve

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_late_readers")]

OTHERS = {
    "coordinator.schedule": ("one_step_off", "sync"),
    "coordinator.placement": ("disaggregated", "colocated"),
    "coordinator.learner_slots": ("1", "0"),
    "coordinator.max_policy_lag": ("1", "0"),
    "coordinator.slots_per_worker": ("2", "1"),
    "coordinator.prompts_per_step": ("1", "2"),
    "coordinator.samples_per_task": ("3", "2"),
    "coordinator.dynamic_sampling_rounds": ("1", "0"),
}
"""The new value, and the value with which the run began."""
TOGETHER = (
    ("coordinator.schedule", "coordinator.max_policy_lag"),
    ("coordinator.placement", "coordinator.learner_slots"),
    ("coordinator.slots_per_worker",),
    ("coordinator.prompts_per_step",),
    ("coordinator.samples_per_task",),
    ("coordinator.dynamic_sampling_rounds",),
)
WORKERS, TASKS = "gateway.engine.workers", "coordinator.tasks_path"
FIRST = KEPT["leasable_workers"]


@pytest.mark.slow
async def test_a_run_is_not_taken_up_with_other_settings_than_its_state_is_counted_in(
    redis_url: str, tmp_path: Path
) -> None:
    assert {WORKERS, FIRST, TASKS, *OTHERS} == set(KEPT.values())
    async with running_peers(script := Script(hold_step=0)) as peers:
        words = overrides(peers, redis_url, tmp_path)
        stop = asyncio.Event()
        first = asyncio.create_task(serve(config_of(words), stop))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        stop.set()
        await first
        entries = await journal_of(config_of(words))
        for names in TOGETHER:
            changed = [f"{name}={OTHERS[name][0]}" for name in names]
            with pytest.raises(ConfigError, match="has begun with other settings") as refused:
                await run_to_end(config_of([*words, *changed]))
            seen, kept = str(refused.value.seen), str(refused.value.allowed)
            assert sorted(seen.split(", ")) == sorted(changed)
            assert all(f"{name}={OTHERS[name][1]}" in kept for name in names)
        tasks = tmp_path / "train.jsonl"
        before = tasks.read_text()
        tasks.write_text(before.replace('"answer": "', '"answer": "1', 1))
        with pytest.raises(ConfigError, match=f"seen: {TASKS}=.* tasks of hash .*; allowed"):
            await run_to_end(config_of(words))
        tasks.write_text(before)
        script.workers = 1  # of each of two gateways
        gateway = f'["127.0.0.1:{peers.ports["gateway"]}"]'
        two = [f"addresses.more_gateways{http}={gateway}" for http in ("", "_http")]
        with pytest.raises(ConfigError) as refused:
            await run_to_end(config_of([*words, *two]))
        assert refused.value.seen == f"{FIRST}=1"
        assert str(refused.value.allowed).startswith(f"{FIRST}=0, or")
        script.workers = 3
        with pytest.raises(ConfigError, match=f"seen: {WORKERS}=3; allowed: {WORKERS}=2, or"):
            await run_to_end(config_of(words))
        assert await journal_of(config_of(words)) == entries


async def test_a_run_is_taken_up_with_other_settings_that_its_state_does_not_depend_on(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_peers(script := Script(hold_step=0)) as peers:
        words = overrides(peers, redis_url, tmp_path, steps=2)
        stop = asyncio.Event()
        first = asyncio.create_task(serve(config_of(words), stop))
        await asyncio.wait_for(script.holding.wait(), WAIT_S)
        stop.set()
        await first
        script.released.set()
        free = ["coordinator.steps=3", "coordinator.service_recovery_s=90", "run.seed=4"]
        await run_to_end(config_of([*words, *free]))
    assert len(script.commits) == 3
