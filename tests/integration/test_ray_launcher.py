"""`paceline demo --launcher ray` on a real Ray cluster of one node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from demo_runs import SMALL, demo, left_over, outcome, wait_for
from ray_cluster import ray_head
from ray_nodes import WITH_RAY

from paceline.cluster.keeper import DESERTED_S
from paceline.local.patience import patient

pytestmark = [WITH_RAY, pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def on_cluster() -> Iterator[list[str]]:
    """Options that launch a run on a cluster of two slots."""
    with ray_head() as address:
        yield ["--launcher", "ray", "--address", address]


def finished(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=patient(240))
    assert process.returncode == 0, output
    return output


def summary(run: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return kept


@pytest.mark.slow
def test_a_run_on_a_cluster_has_the_tokens_and_weights_of_one_beside_it(
    tmp_path: Path, on_cluster: list[str]
) -> None:
    words = ("--steps", "2", *SMALL)
    there = demo(tmp_path / "there", *words, *on_cluster)
    finished(there)
    finished(demo(tmp_path / "here", *words))
    runs = [tmp_path / one / "demo-0-1" for one in ("there", "here")]
    assert outcome(runs[0]) == outcome(runs[1])
    assert summary(runs[0])["trajectories_lost"] == 0
    assert (runs[0] / "report.html").is_file()
    assert left_over(tmp_path) == []


def test_what_ray_says_of_its_own_processes_is_no_line_of_the_commands_output() -> None:
    code = """
from paceline.cluster.joined import _imported
_imported(alone=True)
from ray._private import worker
said = {"lines": ["a worker died"], "pid": "raylet", "is_err": False}
worker.print_to_stdstream(said, ignore_prefix=False)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=True,
    )
    assert (done.stdout, "a worker died" in done.stderr) == ("", True)


@pytest.mark.slow
def test_a_killed_service_comes_back_and_a_killed_keeper_has_the_run_taken_up_again(
    tmp_path: Path, on_cluster: list[str]
) -> None:
    process = demo(tmp_path, "--steps", "6", *SMALL, *on_cluster)
    lines = wait_for(process, "step 1/6")
    started = {line.split()[0]: line for line in lines if " started (pid " in line}
    pids = {name: int(line.split("pid ")[1].split(")")[0]) for name, line in started.items()}
    keeper = psutil.Process(pids["gateway"]).parent()
    assert keeper is not None
    os.kill(pids["policy_trainer"], signal.SIGKILL)
    second = demo(tmp_path / "again", "--steps", "1", *SMALL, *on_cluster)
    refusal, _ = second.communicate(timeout=patient(120))
    assert "a run of this id is on the cluster already" in refusal
    before = wait_for(process, "policy_trainer healthy")
    keeper.kill()
    output = "".join(before) + finished(process)
    assert "policy_trainer restarted" in output
    assert "the run is resumed on the remaining nodes" in output
    run = summary(tmp_path / "demo-0-1")
    assert run["trajectories_lost"] == 0
    assert run["steps"] == 6
    assert left_over(tmp_path) == []


@pytest.mark.slow
def test_a_run_whose_starter_is_killed_ends_by_itself(
    tmp_path: Path, on_cluster: list[str]
) -> None:
    process = demo(tmp_path, "--steps", "40", *SMALL, *on_cluster)
    wait_for(process, "step 1/40")
    family = [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(one.info)]
    process.kill()
    process.communicate(timeout=patient(30))
    _, alive = psutil.wait_procs(family, timeout=patient(DESERTED_S + 30))
    assert alive == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gateway.engine.workers=3",), "fewer slots than this run needs"),
        (("--address", "127.0.0.1:1"), "no Ray cluster answers"),
    ],
)
def test_what_cannot_be_launched_is_said_before_anything_is_started(
    words: tuple[str, ...], said: str, tmp_path: Path, on_cluster: list[str]
) -> None:
    process = demo(tmp_path, "--steps", "1", *on_cluster, *words)
    output, _ = process.communicate(timeout=patient(120))
    assert process.returncode != 0
    assert said in output
    assert " started (pid " not in output
