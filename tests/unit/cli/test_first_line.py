"""A run announces its start before it looks up its models and makes its plan."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.local.patience import patient

UP = [sys.executable, "-m", "paceline.cli.main", "up", "--config", "mine.toml"]
BEGUN = "starting a run: reading mine.toml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with run settings that make the plan fail."""
    (tmp_path / "mine.toml").write_text("[gateway]\ntrajectories = false\n")
    return tmp_path


def shown(lines: str, folder: Path) -> list[str]:
    """All that `up` shows, standard output and error as they come."""
    if lines != "terminal":
        command = [*UP, "--lines", lines]
        done = subprocess.run(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 2
        return done.stdout.splitlines()
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    process = subprocess.Popen(UP, cwd=folder, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    said = b""
    while part := _read(ours):
        said += part
    os.close(ours)
    assert process.wait(patient(20)) == 2
    return said.decode().splitlines()


def _read(terminal: int) -> bytes:
    """Return the terminal's next bytes; nothing once every process has left it."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


@pytest.mark.slow
@pytest.mark.parametrize("lines", ["text", "json", "terminal"])
def test_a_run_whose_plan_fails_has_said_first_that_it_starts(lines: str, folder: Path) -> None:
    first, *later = shown(lines, folder)
    if lines == "json":
        told = json.loads(first)
        assert (told["kind"], told["phase"]) == ("phase", BEGUN)
    else:
        assert first == BEGUN
    assert "gateway.trajectories=false" in " ".join(later)


def test_a_run_whose_model_is_looked_up_has_said_that_it_starts(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[gateway]\nmodel = "acme/tiny"\n')
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a Hub that never answers
        silent.settimeout(patient(30))
        hub = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)}
        process = subprocess.Popen(
            [*UP, "--lines", "json"], cwd=tmp_path, stdout=subprocess.PIPE, env=environment
        )
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["phase"] == BEGUN
            asked, _ = silent.accept()
            asked.close()
        finally:
            process.kill()
            process.communicate()


def test_so_does_the_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline.cli.main", "demo", "--lines", "text"]
    process = subprocess.run(
        [*command, "--resume", "none-1"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    first, second = process.stderr.splitlines()[:2]
    assert first == "starting none-1, whose files are in runs"
    assert "no run of this id" in second
