"""A disk fills up repeatedly: acknowledged entries stay, and the run continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.local.checks import ROOM_BYTES, lack_of_room
from paceline.local.patience import patient

RUN = Path(__file__).with_name("full_disk_run.py")
OWN_DISK = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")


@pytest.fixture
def small_disk(tmp_path: Path) -> str:
    """Beginning of a shell command that mounts a disk of 192 MiB, visible to that command only."""
    mount = f"mount -t tmpfs -o size=192m none {tmp_path}"
    if subprocess.run([*OWN_DISK, mount], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a file system of their own")
    return f"{mount} && exec "


@pytest.mark.chaos
@pytest.mark.slow
def test_a_disk_that_fills_up_four_times_loses_nothing_and_is_waited_for_each_time(
    small_disk: str, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    paths = (str(Path(__file__).parents[1]), environment.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [*OWN_DISK, f"{small_disk}{sys.executable} {RUN} {tmp_path}"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=patient(150),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert len(told) == 4
    for line in told:
        assert line.startswith("the disk is full: ")
        assert f"MiB free of 192 MiB where {tmp_path}/logs lies" in line


def test_a_limit_that_the_disk_does_not_show_counts_as_full_too(tmp_path: Path) -> None:
    assert lack_of_room(tmp_path) == ""
    look = "import sys, pathlib; from paceline.local.checks import lack_of_room as lack; "
    look += "print(lack(pathlib.Path(sys.argv[1])))"
    limit = f'ulimit -f {ROOM_BYTES // 1024}; exec "$@"'  # in blocks of 512 bytes
    limited = ["sh", "-c", limit, "sh", sys.executable, "-c", look, str(tmp_path)]
    done = subprocess.run(limited, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("File too large: ")
