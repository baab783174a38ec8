"""Asynchronous training from the command line, judged by Redis' log: every group is trained once or
reported as stale, and no trained token is older than the bound.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from demo_runs import SMALL, demo, left_over

from benchmarks.chaos.remains import read_remains
from benchmarks.trespasses import read_trespasses
from paceline.local.patience import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS, ETA = 4, 2


@pytest.mark.parametrize(
    "apart",
    [
        ("placement=colocated", "commit_mode=retract"),
        ("placement=disaggregated", "learner_slots=1", "commit_mode=abort"),
    ],
    ids=["colocated", "disaggregated"],
)
def test_every_group_is_trained_once_within_the_bound_or_reported_as_stale(
    tmp_path: Path, apart: tuple[str, ...]
) -> None:
    asked = ("schedule=fully_async", f"max_policy_lag={ETA}", *apart)
    chosen = [f"coordinator.{one}" for one in asked]
    process = demo(tmp_path, "--steps", str(STEPS), *SMALL, *chosen)
    output, _ = process.communicate(timeout=patient(400))
    assert process.returncode == 0, output
    assert left_over(tmp_path) == []
    run = tmp_path / "demo-0-1"
    (tmp_path / "run").symlink_to(run)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "hashes.json").write_text("{}")
    branches = read_remains(tmp_path, "demo-0-1").branches
    lags: dict[int, Counter[str]] = {step: Counter() for step in range(STEPS)}
    groups: dict[str, set[str]] = {}
    for key, one in branches.items():
        assert one.finals == one.appended == 1, key
        (fate,) = set(one.fates)
        groups.setdefault(one.record["group_id"], set()).add(fate)
        kind, _, what = fate.partition(":")
        if kind == "trained":  # step s begins with policy version s
            oldest = min(version for _, _, version in one.spans)
            lags[int(what)][str(int(what) - oldest)] += 1
        else:
            assert fate == "dropped:stale", key
    assert {len(fates) for fates in groups.values()} == {1}  # a group is trained as a whole
    found = {int(lag) for of_step in lags.values() for lag in of_step}
    assert min(found) >= 0
    assert 1 <= max(found) <= ETA  # and some groups were older than the policy that trained them
    told = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    assert {int(one.get("step", 0)): one["staleness"] for one in told} == {
        step: dict(of_step) for step, of_step in lags.items()
    }
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["phase"]) == (STEPS, "finished")
    assert read_trespasses(run) == {"engine": 0, "policy": 0, "drafter": 0}
    assert summary["trajectories_lost"] == 0
    assert summary["trajectories_published"] == len(branches) >= STEPS * 16
