"""The gateway's bench runs with its real processes; its figures are for `paceline bench`, not for a test."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil

COMMAND = [sys.executable, "-m", "rollout_gateway.bench", "gateway", "--streams", "1,4", "--tokens", "16"]


def test_every_stream_is_whole_all_sessions_answer_and_no_process_is_left(tmp_path: Path) -> None:
    words = ["--quick", "--seconds", "1", "--sessions", "20", "--hold-s", "0.1", "--json", str(tmp_path / "g.json")]
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "sessions held open" in done.stdout
    facts = json.loads((tmp_path / "g.json").read_text())
    work = [row for row in facts["rows"] if row["section"] == "requests and their cost"]
    assert [row["load"] for row in work] == ["1 stream", "4 streams", "20/s"]
    assert all(row["right"] > 0 and row["wrong"] == row["failed"] == 0 for row in work)
    held = facts["rows"][-1]
    assert (held["answered right"], held["wrong"], held["failed"]) == (20, 0, 0)
    assert left_over() == []


def test_an_interrupted_bench_leaves_no_process() -> None:
    process = subprocess.Popen(
        [*COMMAND, "--seconds", "60", "--sessions", "0"], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "repeat 1" in line:
            break
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 4  # load, gateway, its worker, the worker called directly
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    process.stderr.close()
    assert [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


def left_over() -> list[str]:
    """Command lines of processes of this test that run still."""
    children = psutil.Process().children(recursive=True)
    return [" ".join(one.cmdline()) for one in children if "rollout_gateway" in " ".join(one.cmdline())]
