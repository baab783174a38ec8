"""`paceline bench` from a checkout and from an installed package."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHES, main, run

ROOT = Path(__file__).resolve().parents[3]


def paceline(*words: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The command as it runs over the libraries below `root`."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root}/libs",
    }
    return subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", "bench", *words],
        capture_output=True,
        text=True,
        env=environment,
        cwd=root,
        timeout=100,
        check=False,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("words", [["list"], ["--help"], []])
def test_every_bench_is_listed(words: list[str]) -> None:
    done = paceline(*words)
    assert done.returncode == 0, done.stderr
    listed = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert listed == list(BENCHES)


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_shows_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(name, ["--help"])
    shown = capsys.readouterr().out
    assert f"usage: paceline bench {name}" in shown
    assert "--json" in shown


@pytest.mark.slow
def test_the_command_passes_options_on() -> None:
    done = paceline("growth", "--help")
    assert done.returncode == 0, done.stderr
    assert "usage: paceline bench growth" in done.stdout


def test_a_name_that_is_no_bench_gives_one_line_with_those_that_are() -> None:
    done = paceline("transprot")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "transprot" in line
    assert all(name in line for name in BENCHES)


def test_a_bench_that_is_told_to_end_cancels_its_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waiting = types.ModuleType("waiting")

    async def wait(options: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        finally:
            (tmp_path / "cancelled").touch()

    waiting.__dict__.update(run=wait, add_arguments=lambda parser: None)
    monkeypatch.setitem(sys.modules, "waiting", waiting)
    monkeypatch.setitem(BENCHES, "waiting", ("waiting", "nothing"))
    monkeypatch.setattr(sys, "argv", ["bench", "waiting"])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 128 + signal.SIGTERM
    assert (tmp_path / "cancelled").exists()


def test_outside_a_checkout_there_are_no_benches(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "libs", tmp_path / "libs")
    done = paceline("list", root=tmp_path)
    assert done.returncode == 2
    assert "not part of the installed package" in done.stderr
    assert "git clone" in done.stderr
