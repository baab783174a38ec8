"""Another user of the machine can read no file of a run, and no Redis of a run has a port."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from demo_runs import SMALL, demo, wait_for

from paceline.local.patience import patient

pytestmark = [pytest.mark.attack, pytest.mark.timeout(300)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    before = os.umask(0o022)  # the umask of most users
    process = demo(tmp_path, "--steps", "1", *SMALL, "policy_trainer.checkpoint_interval_steps=1")
    os.umask(before)
    with process:
        yield process
        process.kill()


def test_no_file_of_a_run_is_for_others_and_no_redis_has_a_port(
    run: subprocess.Popen[str], tmp_path: Path
) -> None:
    wait_for(run, "everything serves")
    servers = [
        child
        for child in psutil.Process(run.pid).children(recursive=True)
        if "redis-server" in child.name()
    ]
    assert len(servers) == 2
    assert [each for server in servers for each in server.net_connections("inet")] == []
    output, _ = run.communicate(timeout=patient(200))
    assert run.returncode == 0, output
    files = [tmp_path / "demo-0-1", *(tmp_path / "demo-0-1").rglob("*")]
    names = {path.name for path in files}
    assert {"config.toml", "redis.log", "summary.json", "report.html", "journal.jsonl"} <= names
    assert [str(path) for path in files if path.lstat().st_mode & 0o077] == []
