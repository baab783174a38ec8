"""A whole run with an engine that is inexact on purpose: the path is named and turned off, and the
run ends well without it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from demo_runs import SMALL, demo

from paceline.local.patience import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

INEXACT = (
    f"gateway.engine.kind={Path(__file__).parents[1] / 'inexact.py'}:INEXACT",
    "policy_trainer.audit.share=1.0",
    "policy_trainer.audit.least_tokens=100",
    "coordinator.evaluation.probe_prompts=0",
    "coordinator.evaluation.heldout_prompts=4",
)


def test_a_run_with_a_broken_cache_says_so_goes_on_without_it_and_is_exact_again(
    tmp_path: Path,
) -> None:
    fault = "gateway.engine.options.fault=reused"
    process = demo(tmp_path, "--steps", "4", *SMALL, *INEXACT, fault)
    output, _ = process.communicate(timeout=patient(500))
    assert process.returncode == 0, output
    assert "the audit found reused inexact" in output
    run = tmp_path / "demo-0-1"
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    assert steps[-1]["quarantined"] == ["reused"]
    first, last = steps[0]["policy"], steps[-1]["policy"]
    assert first["audit_gap/reused"] > 0.1
    assert "audit_gap/reused" not in last
    assert last["behavior_gap"] < 1e-4
    logs = (run / "logs" / "coordinator.log").read_text()
    assert re.search(r"\[error +\] inexact_path .*path=reused", logs)
    report = (run / "report.html").read_text()
    assert "Exactness audit" in report
    assert "reused" in report
