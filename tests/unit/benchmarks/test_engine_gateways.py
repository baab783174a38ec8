"""The engine bench's sections with gateways: they run, and their conclusions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engine.gateways import CAPTURED, PLAIN, RolloutTurn, capture_findings
from paceline.local.patience import patient


def turn(cpu_s: float, *, tokens_hash: str = "a", batches: int = 0) -> RolloutTurn:
    parts = {"gateway": 0.2 * cpu_s, "workers": 0.8 * cpu_s}
    return RolloutTurn(2.0, parts, 1000, (tokens_hash,), batches)


@pytest.mark.parametrize(("cost", "met"), [(1.02, True), (1.05, False)])
def test_capture_is_judged_by_the_cpu_time_of_all_processes(cost: float, *, met: bool) -> None:
    noise = [1 + 0.004 * (-1) ** number for number in range(12)]
    found = capture_findings(
        {
            CAPTURED: [turn(cost * one, batches=48) for one in noise],
            PLAIN: [turn(one) for one in noise[::-1]],
        }
    )
    assert [goal.met for goal in found.goals] == [met, True]
    captured, plain = found.rows
    assert (captured["sessions published"], plain["sessions published"]) == (48, 0)
    assert captured["CPU s a rollout"] == pytest.approx(cost, rel=0.01)


def test_other_tokens_with_capture_are_seen() -> None:
    found = capture_findings({CAPTURED: [turn(1.0, tokens_hash="b")], PLAIN: [turn(1.0)]})
    assert [goal.met for goal in found.goals] == [None, False]  # of one pair no cost is judged


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_gateways_start_and_publish(tmp_path: Path) -> None:
    result = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks", "engine", "--only", "launch,capture"]
    subprocess.run(
        [*command, "--pairs", "1", "--json", str(result)], check=True, timeout=patient(300)
    )
    found = json.loads(result.read_text())
    assert len(found["rows"]) == 3
    assert found["goals"][-1]["met"], "tokens differ"
