"""Results collected when a run ends: the journal's copy and the count of trajectories, over a real
Redis.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis.asyncio
import synthetic_run

from paceline.cli.report import collect, write_results
from paceline.cli.run_files import RunFiles
from paceline.config import ServiceConfig
from paceline.config.load import write_tables
from paceline.streams import Ledger, encode_trajectory, run_key
from paceline.streams.journal import pack_entry
from paceline.trajectory import BranchKey, Trajectory, VersionSpan


def trajectory(run_id: str, sample: int) -> Trajectory:
    return Trajectory(
        key=BranchKey(run_id, f"session-{sample}"),
        step=0,
        task_id="gcd-1",
        group_id="g",
        group_size=4,
        task_index=0,
        sample_index=sample,
        token_ids=(1, 2, 3),
        loss_mask=(0, 1, 1),
        behavior_logprobs=(0.0, -0.5, -0.25),
        version_spans=(VersionSpan(1, 3, 0),),
        reward=1.0,
        finish_reason="stop",
        seed=sample,
        temperature=1.0,
    )


@pytest.fixture
async def files(tmp_path: Path, redis_client: redis.asyncio.Redis, run_id: str) -> RunFiles:
    """A finished run: its journal, and four trajectories of which two are trained."""
    ledger = Ledger(redis_client, run_id)
    for sample in range(4):
        one = trajectory(run_id, sample)
        assert await ledger.append_final(one, *encode_trajectory(one))
    await ledger.mark_trained([str(trajectory(run_id, sample).key) for sample in (0, 1)], 0)
    for number, entry in enumerate(synthetic_run.entries(12), 1):
        await redis_client.xadd(
            run_key(run_id, "journal"), {"entry": pack_entry(entry)}, id=f"{number}-0"
        )
    found = RunFiles(run_id, tmp_path)
    write_tables(found.config, {"run": {"id": run_id}})
    return found


def config(redis_url: str, run_id: str) -> ServiceConfig:
    return ServiceConfig.model_validate(
        {"run": {"id": run_id}, "redis": {"durable_url": redis_url}}
    )


async def test_results_of_a_finished_run_are_complete(
    files: RunFiles, redis_url: str, run_id: str
) -> None:
    ledger = await collect(config(redis_url, run_id), files)
    summary = write_results(files, ledger, {"gateway": 7})
    assert json.loads(files.summary.read_text()) == summary
    assert (
        summary["steps"],
        summary["trajectories_published"],
        summary["trajectories_trained"],
    ) == (12, 4, 2)
    assert (summary["trajectories_open"], summary["trajectories_lost"]) == (2, 0)
    assert summary["pids"] == {"gateway": 7}
    assert len((files.directory / "steps.jsonl").read_text().splitlines()) == 12
    assert files.report.read_text().startswith("<!doctype html>")


async def test_a_deleted_entry_counts_as_lost(
    files: RunFiles, redis_client: redis.asyncio.Redis, redis_url: str, run_id: str
) -> None:
    stream = run_key(run_id, "trajectories")
    newest = (await redis_client.xrevrange(stream, count=1))[0][0]
    assert await redis_client.xdel(stream, newest) == 1
    ledger = await collect(config(redis_url, run_id), files)
    assert write_results(files, ledger, {})["trajectories_lost"] == 1
