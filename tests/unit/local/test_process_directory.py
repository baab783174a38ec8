"""The directory of a process ends with it, at once or at the next start of another one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.local.patience import patient
from paceline.local.user_directory import SOCKET_BYTES

CHILD = """
import pathlib, sys
from paceline.local.user_directory import process_directory
own = process_directory()
(own / "deep").mkdir()
(own / "deep" / "file").write_text("mine")
assert process_directory() == own
print(own, flush=True)
sys.stdin.readline()
"""
Start = Callable[[], subprocess.Popen[str]]


def own(child: subprocess.Popen[str]) -> Path:
    """Return the directory that a child printed as its own."""
    assert child.stdout is not None
    return Path(child.stdout.readline().strip())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    children = []
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def start() -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        with child:
            child.kill()


def test_it_is_private_to_a_process_and_gone_when_that_ends(start: Start, tmp_path: Path) -> None:
    first, second = start(), start()
    one, other = own(first), own(second)
    assert one != other
    assert one.is_relative_to(tmp_path)
    assert (one.stat().st_mode & 0o777, one.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    first.communicate("\n")
    assert not one.exists()
    assert (other / "deep" / "file").read_text() == "mine"


def test_that_of_a_killed_process_is_swept_by_the_next_and_a_living_ones_stays(
    start: Start,
) -> None:
    killed, neighbour = start(), start()
    left, living = own(killed), own(neighbour)
    killed.kill()
    killed.wait()
    assert (left / "deep" / "file").exists()
    third = own(start())
    assert set(third.parent.iterdir()) == {living, third}
    assert (living / "deep" / "file").read_text() == "mine"


def test_those_that_start_at_once_sweep_nothing_that_lives(start: Start) -> None:
    for _ in range(2):
        killed = start()
        own(killed)
        killed.kill()
        killed.wait()
    starting = [start() for _ in range(6)]
    found = {own(child) for child in starting}
    assert len(found) == 6
    assert found == set(next(iter(found)).parent.iterdir())


SOCKETS = """
from paceline.local.user_directory import process_directory, socket_directory
print(process_directory())
print(socket_directory(), flush=True)
assert socket_directory().stat().st_mode & 0o777 == 0o700
"""
LONGEST_NAME = "sglang-12345678/tmp12345678"


@pytest.mark.parametrize("length", [30, 36, 37, 69, 79, 120])
def test_sockets_have_short_paths_wherever_tmpdir_is(length: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as short:  # its length counts
        temporary = Path(short) / ("x" * (length - len(short) - 1))
        temporary.mkdir()
        child = subprocess.run(
            [sys.executable, "-c", SOCKETS],
            env={**os.environ, "TMPDIR": str(temporary)},
            capture_output=True,
            text=True,
            check=True,
            timeout=patient(20),
        )
    own, sockets = map(Path, child.stdout.split())
    assert own.is_relative_to(temporary)
    assert len(str(sockets / LONGEST_NAME)) <= SOCKET_BYTES
    if len(str(own / LONGEST_NAME)) <= 70:
        assert sockets == own
    assert not sockets.exists()
