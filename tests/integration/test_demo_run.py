"""`paceline demo` from the command line: real services, real Redis, real signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from demo_runs import SMALL, demo, left_over, wait_for

from benchmarks.demo_runs import demo_folder
from benchmarks.trespasses import WORK, read_trespasses
from paceline.local.patience import patient
from paceline.report.spans import read_spans
from paceline.report.why import explain
from paceline.telemetry import names

pytestmark = pytest.mark.timeout(600)


def paceline(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    return subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(300),
        check=False,
    )


def test_a_short_demo_leaves_a_summary_a_report_and_no_process(tmp_path: Path) -> None:
    process = demo(tmp_path, "--steps", "3", *SMALL)
    output, _ = process.communicate(timeout=patient(400))
    assert process.returncode == 0, output
    run = tmp_path / "demo-0-1"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["phase"]) == (3, "finished")
    assert read_trespasses(run) == {"engine": 0, "policy": 0, "drafter": 0}
    worked = {one.name for one in read_spans(run / "spans")}
    assert {"engine.busy", "policy.optimizer_step"} <= worked & set(WORK)
    assert {"RolloutService.RunTasks", "trajectory.append"} <= worked
    assert summary["trajectories_lost"] == 0
    assert summary["trajectories_published"] == summary["trajectories_trained"] == 3 * 16
    services = [
        summary["pids"][name]
        for name in ("coordinator", "gateway", "policy_trainer", "drafter_trainer")
    ]
    assert len(set(services)) == 4
    assert summary["policy_versions"] == 4
    for line in (run / "steps.jsonl").read_text().splitlines():
        step = json.loads(line)
        slots_wall_s = summary["slots"] * step["step_s"]
        assert sum(step["slot_s"].values()) == pytest.approx(slots_wall_s, rel=0.01)
        assert sum(step["idle_s"].values()) == pytest.approx(step["slot_s"]["idle"])
    assert sum(summary["slot_s"].values()) == pytest.approx(summary["slot_wall_s"], rel=0.01)
    assert summary["accuracy_first"] is not None
    assert summary["accept_len_last"] >= 1.0
    report = (run / "report.html").read_text()
    assert "Reward and held-out accuracy" in report
    assert left_over(tmp_path) == []
    told = explain(run / "spans", 1)
    assert (told.step, told.peers) == (1, 2)
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    assert told.seconds == pytest.approx(steps[1]["step_s"], rel=0.2)
    assert sum(part.seconds for part in told.parts) == pytest.approx(told.seconds)
    assert names.engine_stage("decode") in {part.name for part in told.parts}
    # the gateway commits the set while the drafter leaves its slots; the longer call ends the step
    edges = {part.edge.split()[-1] for part in told.parts}
    assert {"WeightService.Commit", "DrafterService.Preempt"} & edges
    assert told.cause.startswith("step 1 took ")
    slowest = paceline("why", str(run))
    assert slowest.returncode == 0, slowest.stderr
    assert " took " in slowest.stdout
    assert "share" in slowest.stdout


@pytest.mark.slow
def test_an_interrupted_demo_leaves_no_process_and_is_taken_up_again(tmp_path: Path) -> None:
    process = demo(tmp_path, "--steps", "40", *SMALL)
    wait_for(process, "step 1/40")
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 6 + 2 + 3  # services and Redis, engine workers, trainer ranks
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=patient(60))
    assert process.returncode == 130, output
    assert "--resume demo-0-1" in output
    assert [child for child in family if child.is_running()] == []
    assert left_over(tmp_path) == []
    run = tmp_path / "demo-0-1"
    (run / "report.html").unlink()  # the summary was written when the run was stopped
    again = paceline("report", str(run))
    assert again.returncode == 0, again.stderr
    assert json.loads((run / "summary.json").read_text())["steps"] >= 1
    assert (run / "report.html").is_file()
    assert left_over(tmp_path) == []
    done = demo(tmp_path, "--resume", "demo-0-1", "--steps", "3")
    output, _ = done.communicate(timeout=patient(300))
    assert done.returncode == 0, output
    summary = json.loads((tmp_path / "demo-0-1/summary.json").read_text())
    assert summary["steps"] >= 2
    assert summary["trajectories_lost"] == 0


@pytest.mark.slow
def test_a_program_that_reads_a_run_gets_json_lines(tmp_path: Path) -> None:
    words = ("--out", str(tmp_path), "--steps", "2", "--tracker", "tensorboard")
    done = paceline("demo", *words, *SMALL)
    assert done.returncode == 0, done.stderr
    objects = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [one["kind"] for one in objects]
    assert kinds[0] == "phase"  # printed before settings are read
    assert kinds.index("run") < kinds.index("serving") < kinds.index("step")
    assert [one.get("step", "0") for one in objects if one["kind"] == "step"] == ["0", "1"]
    assert (kinds[-1], objects[-1]["summary"]["steps"]) == ("summary", 2)
    run, other = tmp_path / "demo-0-1", tmp_path / "other"
    assert list(run.rglob("events.out.tfevents.*"))
    shutil.copytree(run, other)
    settings = (run / "config.toml").read_text().replace(str(run), str(other))
    (other / "config.toml").write_text(settings.replace("seed = 0", "seed = 7"))
    beside = paceline("report", str(run), "--against", str(other))
    assert beside.returncode == 0, beside.stderr
    assert "run.seed" in beside.stderr
    assert str(other) in (run / "report.html").read_text()


@pytest.mark.slow
def test_a_policy_is_evaluated_without_a_run() -> None:
    """examples/demo/evaluate_policy.py samples with transformers and measures 0.84."""
    folder = demo_folder()
    tasks, model = str(folder / "tasks_heldout.jsonl"), str(folder / "policy_trained")
    words = ["--prompts", "64", "--max-tokens", "368", "--samples", "2", "--json"]
    done = paceline("eval", model, tasks, *words, "gateway.engine.workers=2")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["samples"] == 128
    assert figures["accuracy"] > 0.75
    assert figures["pass@2"] >= figures["accuracy"]
    assert 0 <= figures["truncated"] < 0.5


@pytest.mark.slow
def test_a_killed_gateway_is_restarted_and_the_run_goes_on(tmp_path: Path) -> None:
    process = demo(tmp_path, "--steps", "4", *SMALL)
    lines = wait_for(process, "step 1/4")
    started = next(line for line in lines if line.startswith("gateway started"))
    os.kill(int(started.split("pid ")[1].split(")")[0]), signal.SIGKILL)
    output, _ = process.communicate(timeout=patient(300))
    assert process.returncode == 0, output
    assert "gateway restarted" in output
    summary = json.loads((tmp_path / "demo-0-1/summary.json").read_text())
    assert (summary["steps"], summary["trajectories_lost"]) == (4, 0)


@pytest.mark.slow
def test_a_service_that_cannot_start_is_reported_once_with_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    process = demo(tmp_path, "--steps", "1", f"gateway.model={tmp_path / 'nowhere'}")
    output, _ = process.communicate(timeout=patient(120))
    assert process.returncode == 1
    assert "not a checkpoint directory" in output
    assert "--resume demo-0-1" in output
    assert left_over(tmp_path) == []
