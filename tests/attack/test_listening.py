"""A demo listens on loopback and in directories of its own user only, and no other user can read
a file of its run.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from demo_runs import SMALL, demo, wait_for
from listening import beyond_loopback, open_doors

from paceline.local.patience import patient

pytestmark = [pytest.mark.attack, pytest.mark.timeout(200)]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    before = os.umask(0o022)  # the umask of most users
    every_step = "policy_trainer.checkpoint_interval_steps=1"
    process = demo(tmp_path, "--steps", "2", *SMALL, "policy_trainer.ranks=2", every_step)
    os.umask(before)
    with process:
        yield process
        process.kill()


def is_private(folder: Path) -> bool:
    """Whether only this user can enter the folder; an abstract socket has no folder."""
    about = folder.lstat()
    return folder.is_absolute() and (about.st_uid, about.st_mode & 0o077) == (os.getuid(), 0)


def test_a_demo_listens_on_loopback_and_keeps_files_and_sockets_from_other_users(
    running: subprocess.Popen[str], tmp_path: Path
) -> None:
    wait_for(running, "everything serves")
    family = [psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True)]
    inet, unix = open_doors(family)
    modules = " ".join(word for process in family for word in process.cmdline())
    for part in (
        "coordinator",
        "rollout_gateway",
        "paceline.services.policy_trainer.rank",
        "paceline.services.drafter_trainer.rank",
    ):
        assert part in modules
    assert len(inet) >= 5  # four services and the gateway's HTTP
    assert beyond_loopback(inet) == []
    servers = [child for child in family if "redis-server" in child.name()]
    assert len(servers) == 2
    assert [each for server in servers for each in server.net_connections("inet")] == []
    assert len(unix) >= 4  # two Redis, two trainers; the engine's workers
    assert {path for path in unix if not is_private(Path(path).parent)} == set()
    output, _ = running.communicate(timeout=patient(150))
    assert running.returncode == 0, output
    files = [tmp_path / "demo-0-1", *(tmp_path / "demo-0-1").rglob("*")]
    names = {path.name for path in files}
    assert {"config.toml", "redis.log", "summary.json", "report.html", "journal.jsonl"} <= names
    assert [str(path) for path in files if path.lstat().st_mode & 0o077] == []
