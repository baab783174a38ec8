"""A whole run over two gateways on one host equals a run over one gateway with as many workers.

It draws the same tokens, trains the same weights, survives the loss of the second gateway, and
trains every trajectory once.
"""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path

import psutil
import pytest
from demo_runs import SMALL, demo, wait_for

from benchmarks.trespasses import read_trespasses
from paceline.local.patience import patient
from paceline.local.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, PROMPTS, SAMPLES = 4, 4, 4
DRAWN = ("tokens_hash", "response_tokens", "groups_solved")


def two_gateways() -> tuple[str, ...]:
    grpc, http = free_ports(2)
    return (
        "gateway.engine.workers=1",
        f'addresses.more_gateways=["127.0.0.1:{grpc}"]',
        f'addresses.more_gateways_http=["127.0.0.1:{http}"]',
    )


def drawn(run: Path) -> list[dict[str, object]]:
    """Figures of the drawn tokens of each step."""
    lines = (run / "steps.jsonl").read_text().splitlines()
    return [{name: json.loads(line)[name] for name in DRAWN} for line in lines]


def weights(run: Path, gateway: str) -> str:
    """Hash of the last policy at a gateway."""
    file = run / "spool" / gateway / f"policy-{STEPS}" / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_two_gateways_draw_the_tokens_of_one_although_the_second_is_killed(tmp_path: Path) -> None:
    process = demo(tmp_path / "two", "--steps", str(STEPS), *SMALL, *two_gateways())
    two = tmp_path / "two" / "demo-0-1"
    wait_for(process, "step 2")
    second = psutil.Process(int((two / "pids" / "gateway-1.pid").read_text()))
    second.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=patient(400))
    assert process.returncode == 0, output
    assert "gateway-1 died" in output
    summary = json.loads((two / "summary.json").read_text())
    assert (summary["steps"], summary["phase"]) == (STEPS, "finished")
    assert read_trespasses(two) == {"engine": 0, "policy": 0, "drafter": 0}
    assert summary["trajectories_lost"] == 0
    wanted = STEPS * PROMPTS * SAMPLES
    assert summary["trajectories_published"] == summary["trajectories_trained"] == wanted

    process = demo(tmp_path / "one", "--steps", str(STEPS), *SMALL, "gateway.engine.workers=2")
    output, _ = process.communicate(timeout=patient(400))
    assert process.returncode == 0, output
    one = tmp_path / "one" / "demo-0-1"
    assert drawn(two) == drawn(one)
    assert weights(two, "gateway") == weights(two, "gateway-1") == weights(one, "gateway")
