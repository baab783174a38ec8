"""The policy's bench runs with its real processes; only `paceline bench` judges its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.policy.checkpoints import checkpointed
from benchmarks.policy.run import Case, compared
from benchmarks.policy.work import Work, demo_model, demo_samples

pytestmark = pytest.mark.slow


async def test_both_sides_step_on_the_same_batch_and_are_timed_in_pairs(tmp_path: Path) -> None:
    samples = demo_samples(tmp_path / "samples.json", 2)
    case = Case("tiny", demo_model(), Work(str(samples), still=1), 2)
    row, ratio = await compared(case, 2, tmp_path)
    assert row["tokens"] == sum(len(one.token_ids) for one in case.work.trajectories()) > 2 * 8 * 7
    assert ratio.pairs == 2
    assert min(float(row[name] or 0) for name in ("tokens/s", "tokens/s plain", "MiB")) > 0


@pytest.mark.slow
async def test_steps_with_a_checkpoint_are_timed_beside_steps_without(tmp_path: Path) -> None:
    work = Work(str(demo_samples(tmp_path / "samples.json", 1)))
    row, goal = await checkpointed("tiny", demo_model(), work, 2, 1, tmp_path)
    assert float(row["stall ms"] or 0) > 0
    assert float(row["step ms"] or 0) > 0
    assert goal.value < 0
    (written,) = (tmp_path / "run" / "checkpoints" / "policy").glob("step-*")
    assert len(list((written / "shards").iterdir())) == 2
