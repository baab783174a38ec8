"""Start and end of a service process, observed from outside."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.local.patience import patient
from paceline.local.ports import free_port
from paceline.local.processes import EXIT_FULL, EXIT_RUN_FAILED

pytestmark = pytest.mark.slow

STUB = Path(__file__).parent / "entry_stub.py"


def _start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    address = f"addresses.policy_trainer=127.0.0.1:{free_port()}"
    return subprocess.Popen(
        [sys.executable, str(STUB), f"run.dir={tmp_path}", address, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "40"},
        umask=0o022,
    )


def _ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=patient(30))
    return process.returncode, out, err


def test_a_service_that_ends_by_itself_exits_with_0(tmp_path: Path) -> None:
    assert _ended(_start(tmp_path, "mode=finish"))[0] == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_in_order_and_shows_in_the_status(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = _start(tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "serving\n"
    pid_file = tmp_path / "pids" / "policy_trainer.pid"
    for path in (pid_file, pid_file.parent, tmp_path / "serving"):
        assert path.stat().st_mode & 0o077 == 0
    assert int(pid_file.read_text()) == process.pid
    process.send_signal(number)
    assert _ended(process)[0] == 128 + number
    assert pid_file.read_text() == ""


def test_a_second_service_of_a_run_is_refused_with_the_first_ones_pid_and_start(
    tmp_path: Path,
) -> None:
    first = _start(tmp_path)
    assert first.stdout is not None
    assert first.stdout.readline() == "serving\n"
    (tmp_path / "serving").unlink()
    code, out, err = _ended(_start(tmp_path))
    assert (code, out) == (1, "")
    assert re.fullmatch(
        rf"policy_trainer: the policy_trainer of {tmp_path} runs already; "
        rf"seen: pid {first.pid}, since [0-9: +-]*; allowed: .*\n",
        err,
    )
    assert not (tmp_path / "serving").exists()
    first.kill()
    assert _ended(first)[0] == -signal.SIGKILL

    third = _start(tmp_path)
    assert third.stdout is not None
    assert third.stdout.readline() == "serving\n"
    third.terminate()
    _ended(third)


@pytest.mark.slow
def test_files_and_overrides_reach_the_service(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[run]\nid = "from-file"\n[policy_trainer]\nmode = "fail"\n')
    process = _start(tmp_path, "--config", str(config), "mode=wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "serving\n"
    assert (tmp_path / "serving").read_text() == "from-file"
    process.terminate()
    _ended(process)


def test_an_error_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    code, out, err = _ended(_start(tmp_path, "mode=fail"))
    assert (code, out) == (1, "")
    assert err == "policy_trainer: the model is [bold]not[/bold] there; seen: models/x\n"


@pytest.mark.slow
def test_a_failed_run_has_an_exit_status_of_its_own(tmp_path: Path) -> None:
    code, _, err = _ended(_start(tmp_path, "mode=run"))
    assert code == EXIT_RUN_FAILED
    assert err == "policy_trainer: run r failed in step 3: the loss is not finite; seen: nan\n"


@pytest.mark.slow
def test_what_may_pass_by_itself_has_an_exit_status_of_its_own(tmp_path: Path) -> None:
    code, _, err = _ended(_start(tmp_path, "mode=full"))
    assert (code, err) == (EXIT_FULL, "policy_trainer: Redis has no memory left\n")


@pytest.mark.slow
def test_an_error_in_a_task_group_is_one_line_too(tmp_path: Path) -> None:
    code, _, err = _ended(_start(tmp_path, "mode=group"))
    assert (code, err) == (1, "policy_trainer: a task of a group failed\n")


@pytest.mark.slow
def test_a_bug_keeps_its_traceback(tmp_path: Path) -> None:
    code, _, err = _ended(_start(tmp_path, "mode=bug"))
    assert code == 1
    assert "ZeroDivisionError: our own fault" in err
    assert "Traceback" in err


@pytest.mark.slow
def test_a_misspelt_setting_exits_with_2_and_the_nearest_key(tmp_path: Path) -> None:
    code, _, err = _ended(_start(tmp_path, "moed=wait"))
    assert code == 2
    assert "mode" in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_port_in_use_is_one_line_with_port_and_setting(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = _ended(_start(tmp_path, f"addresses.policy_trainer=127.0.0.1:{port}"))
    assert code == 1
    assert f"port {port} is in use" in err
    assert "addresses.policy_trainer" in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_the_config_is_printed_and_nothing_is_started(tmp_path: Path) -> None:
    code, out, _ = _ended(_start(tmp_path, "--print-config", "run.id=shown"))
    assert code == 0
    assert 'id = "shown"' in out
    assert not (tmp_path / "pids").exists()
