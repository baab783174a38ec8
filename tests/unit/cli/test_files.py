"""Commands on a run's files, and commands before a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
import shellingham
import synthetic_run
from redis_servers import RedisServer
from typer.testing import CliRunner

from benchmarks.demo_runs import demo_folder
from paceline.cli.main import app
from paceline.cli.plan import write_settings
from paceline.config.load import load_config, read_tables, write_tables
from paceline.errors import ConfigError
from paceline.local.redis import RedisLauncher
from paceline.rpc import MOST_TASK_BYTES
from paceline.services.coordinator.config import CoordinatorConfig
from paceline.streams import run_key
from paceline.streams.journal import pack_entry
from paceline.tasks import TaskFileError

POLICY = demo_folder() / "policy_start"
TASKS = demo_folder() / "tasks_train.jsonl"


def paceline(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline.cli.main", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The files of a run with two logs."""
    folder = tmp_path / "runs" / "demo-0-1"
    (folder / "logs").mkdir(parents=True)
    (folder / "config.toml").write_text("")
    for name in ("gateway", "policy_trainer.rank-rank0"):
        lines = "".join(f"{name} {number}\n" for number in range(30))
        (folder / "logs" / f"{name}.log").write_text(lines)
    return folder


def test_the_version_is_printed_alone() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert done.output.strip().count(".") >= 2
    assert "\n" not in done.output.strip()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the tests themselves may have been begun by no shell
    monkeypatch.setattr(shellingham, "detect_shell", lambda: (shell, f"/bin/{shell}"))
    done = CliRunner().invoke(app, ["--show-completion"], prog_name="paceline")
    assert done.exit_code == 0
    begun = {"bash": "_paceline_completion()", "zsh": "#compdef", "fish": "complete --command"}
    assert begun[shell] in done.output


def test_up_without_settings_says_what_to_do() -> None:
    done = CliRunner().invoke(app, ["up"])
    assert done.exit_code == 2
    assert "paceline init" in done.output
    assert "paceline demo" in done.output


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_format_of_lines_that_is_none_is_refused(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--lines", "xml"])
    assert done.exit_code == 2
    assert "'xml' is not one of 'text'" in done.output
    assert "'json'" in done.output


def recorded(folder: Path, steps: int) -> Path:
    """The directory of a run that has ended, with its journal in its own Redis."""
    settings = {"run": {"id": folder.name, "dir": str(folder)}}
    folder.mkdir(parents=True)
    write_tables(folder / "config.toml", settings)
    server = RedisServer(RedisLauncher("durable", folder / "redis-durable"))
    server.start()
    try:
        with redis.Redis.from_url(server.url) as client:
            for number, entry in enumerate(synthetic_run.entries(steps), 1):
                line = {"entry": pack_entry(entry)}
                client.xadd(run_key(folder.name, "journal"), line, id=f"{number}-0")
    finally:
        server.kill()
    return folder


@pytest.mark.slow
def test_the_report_of_a_recorded_run_is_written_without_a_server(tmp_path: Path) -> None:
    run = recorded(tmp_path / "first", 6)
    done = paceline("report", str(run), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (run / "report.html").read_text()
    assert "<h1>Run first</h1>" in page
    assert "Groups solved" in page
    assert len((run / "steps.jsonl").read_text().splitlines()) == 6


@pytest.mark.few(1)
@pytest.mark.parametrize("words", [["why", "no-such-run"], ["report", "no-such-run"]])
def test_a_run_that_is_none_is_named(words: list[str], tmp_path: Path) -> None:
    done = paceline(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "no-such-run" in done.stderr


def given(tasks: Path | None, heldout: Path | None, reward: str) -> dict[str, Any]:
    """The settings that `paceline init` is given."""
    return {"tasks": tasks, "heldout": heldout, "reward": reward, "agents": False}


@pytest.mark.slow
def test_a_new_runs_settings_are_taken_by_its_services(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    plan = write_settings(file, str(POLICY), given(TASKS, None, "math_answer"))
    assert any("policy" in line for line in plan.lines)
    found = load_config(CoordinatorConfig, "coordinator", [file])
    assert (found.run.id, found.run.dir) == ("mine", "runs/mine")
    assert found.tasks_path == str(TASKS)
    assert read_tables(file)["gateway"]["model"] == str(POLICY)
    assert file.read_text().count("#") > 12  # it explains itself


@pytest.mark.slow
def test_without_tasks_the_new_run_is_its_agents(tmp_path: Path) -> None:
    file = tmp_path / "agents.toml"
    write_settings(file, str(POLICY), given(None, None, "math_answer"))
    assert load_config(CoordinatorConfig, "coordinator", [file]).environment == "external"


@pytest.mark.slow
def test_tasks_for_agents_are_claimed_and_held_out_ones_answered_by_the_gateway(
    tmp_path: Path,
) -> None:
    file = tmp_path / "agents.toml"
    tasks, heldout = TASKS, TASKS.with_name("tasks_heldout.jsonl")
    for reward, judge in (("agent", "math_answer"), ("format", "format")):
        write_settings(file, str(POLICY), {**given(tasks, heldout, reward), "agents": True})
        found = load_config(CoordinatorConfig, "coordinator", [file])
        assert (found.environment, found.reward) == ("external", reward)
        assert not found.open_traffic
        assert found.evaluated_by == ("single_turn", judge)
        file.unlink()


@pytest.mark.slow
@pytest.mark.real
def test_generated_tasks_bring_held_out_tasks_and_their_reward(
    tmp_path: Path, reasoning_gym: Path
) -> None:
    families = "reasoning_gym:chain_sum?max_terms=3,gcd"
    file = tmp_path / "mine.toml"
    write_settings(file, str(POLICY), given(Path(families), None, ""))
    found = load_config(CoordinatorConfig, "coordinator", [file])
    assert (found.tasks_path, found.heldout_path) == (families, f"{families}#1")
    assert found.reward == "reasoning_gym"
    unknown = given(Path("reasoning_gym:chain_sun"), None, "")
    with pytest.raises(TaskFileError, match="no such family; seen: chain_sun"):
        write_settings(tmp_path / "b.toml", str(POLICY), unknown)


def test_tasks_that_cannot_be_read_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tasks := tmp_path / "tasks.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n{"text": 3}\n')
    file = tmp_path / "mine.toml"
    with pytest.raises(TaskFileError, match=r"tasks\.jsonl, line 2: no column holds the prompt"):
        write_settings(file, str(POLICY), given(tasks, None, "x"))
    assert not file.exists()


@pytest.mark.parametrize("column", ["prompts=a", "prompt", "prompt="])
def test_eval_refuses_a_column_of_nothing(column: str) -> None:
    done = CliRunner().invoke(app, ["eval", str(POLICY), str(TASKS), "--column", column])
    assert done.exit_code == 2
    assert "prompt | answer | task_id | system=COLUMN" in " ".join(done.output.split())


def test_settings_are_never_written_over(tmp_path: Path) -> None:
    file = tmp_path / "paceline.toml"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="there already"):
        write_settings(file, str(POLICY), given(None, None, "math_answer"))
    assert file.read_text() == "mine"


@pytest.mark.slow
def test_init_says_how_to_start(tmp_path: Path) -> None:
    done = paceline("init", str(POLICY), "--tasks", str(TASKS), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "paceline up --config paceline.toml" in done.stdout
    assert os.access(tmp_path / "paceline.toml", os.R_OK)


@pytest.mark.slow
def test_an_evaluation_whose_tasks_do_not_fit_into_its_call_is_refused_at_the_start(
    tmp_path: Path,
) -> None:
    tasks = tmp_path / "t.jsonl"
    lines = [json.dumps({"prompt": "1" * (3 << 20), "answer": "2"}) for _ in range(3)]
    tasks.write_text("\n".join(lines))
    done = paceline("eval", str(POLICY), str(tasks), "--max-tokens", "1")
    assert done.returncode == 2
    assert "3 of the largest do not fit into one call of the gateway" in done.stderr
    assert "lower --prompts" in done.stderr
    assert f"allowed: {MOST_TASK_BYTES} bytes" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["1e-30", "11"])
def test_an_evaluation_at_a_temperature_out_of_range_is_refused_at_the_start(
    temperature: str,
) -> None:
    done = paceline("eval", str(POLICY), str(TASKS), "--temperature", temperature)
    assert done.returncode == 2
    assert "allowed: 0, or 1e-20 to 10" in done.stderr
