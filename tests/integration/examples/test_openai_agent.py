"""Runs examples/openai_agent as its README does: a run of the real services with the agent's
rollouts.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from example_runs import ROOT, background, run_example, until_it_serves

from paceline.local.patience import patient
from paceline.local.ports import free_ports

FILES = [
    word
    for name in ("demo/demo.toml", "openai_agent/agent.toml")
    for word in ("--config", f"examples/{name}")
]


def test_the_agents_reward_is_that_of_the_demos_task() -> None:
    reward = runpy.run_path(str(ROOT / "examples/openai_agent/agent.py"))["reward"]
    assert reward("48:36=", "%3612%1200#12", "stop") == 1.0
    assert reward("48:36=", "#12", "length") == 0.0  # cut off before the end token
    assert reward("07:03=", "#01", "stop") == 1.0
    for wrong in ("#11", "12", "#", "#1 2", "#²", ""):
        assert reward("48:36=", wrong, "stop") == 0.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_agent_answers_every_sample_of_a_run_which_then_ends_by_itself(tmp_path: Path) -> None:
    steps, tasks, samples = 3, 4, 4
    ports, log = free_ports(8), tmp_path / "up.log"
    url = f"http://127.0.0.1:{ports[2]}"
    words = [
        *own_places(tmp_path, ports),
        f"coordinator.steps={steps}",
        f"coordinator.prompts_per_step={tasks}",
        f"coordinator.samples_per_task={samples}",
        "coordinator.evaluation.heldout_prompts=8",
        "coordinator.evaluation.probe_prompts=4",
    ]
    with background("up", *FILES, *words, log=log) as process:
        until_it_serves(url, process, log)
        done = run_example("openai_agent/agent.py", "--url", url, "--patience", "30", timeout_s=400)
        assert done.returncode == 0, done.stdout + done.stderr + log.read_text()
        assert process.wait(timeout=patient(60)) == 0, log.read_text()
    assert done.stdout.startswith(f"{steps * tasks * samples} sessions, "), done.stdout
    assert (tmp_path / "run/report.html").is_file()
    assert done.stdout.rstrip().endswith(" 0 failed")


def own_places(tmp_path: Path, ports: list[int]) -> list[str]:
    """A separate run: folder, ports, Redis servers."""
    names = ["coordinator", "gateway", "http", "policy_trainer", "drafter_trainer"]
    words = [
        f'addresses.{name}="127.0.0.1:{port}"' for name, port in zip(names, ports, strict=False)
    ]
    words += [f'addresses.events="tcp://127.0.0.1:{ports[5]}"']
    return [
        *words,
        f'run.dir="{tmp_path / "run"}"',
        f'telemetry.spans_dir="{tmp_path / "run/spans"}"',
    ]
