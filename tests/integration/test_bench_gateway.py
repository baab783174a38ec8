"""The gateway's bench runs with its real processes; only `paceline bench` judges its figures."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks.gateway.at_once import at_once_goals, at_once_rows, measure_at_once
from benchmarks.gateway.backends import ScriptPace, engine_settings, write_model
from benchmarks.gateway.turns import TurnPlan, measure_turns, turn_goals, turn_rows
from paceline.local.patience import patient

COMMAND = [
    sys.executable,
    "-m",
    "benchmarks",
    "gateway",
    "--streams",
    "1,4",
    "--tokens",
    "16",
]
COMMAND += ["--turns", "0"]

# its workers are then descendants of the bench
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_forkserver")]


@pytest.fixture
def left_over() -> Callable[[], list[str]]:
    """Command lines of a gateway's processes that this test has started and that still run.
    Processes of earlier tests may still run too and do not count.
    """
    before = psutil.Process().children(recursive=True)

    def found() -> list[str]:
        new = [one for one in psutil.Process().children(recursive=True) if one not in before]
        lines = [" ".join(one.cmdline()) for one in new]
        return [line for line in lines if "rollout_gateway" in line]

    return found


def test_every_stream_is_whole_all_sessions_answer_and_no_process_is_left(
    tmp_path: Path, left_over: Callable[[], list[str]]
) -> None:
    words = [
        "--quick",
        "--seconds",
        "1",
        "--sessions",
        "20",
        "--hold-s",
        "0.1",
        "--json",
        str(tmp_path / "g.json"),
    ]
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=patient(120), check=False
    )
    assert done.returncode == 0, done.stderr
    assert "sessions held open" in done.stdout
    facts = json.loads((tmp_path / "g.json").read_text())
    work = [row for row in facts["rows"] if row["section"] == "requests and their cost"]
    assert [row["load"] for row in work] == ["1 stream", "4 streams", "20/s"]
    assert all(row["right"] > 0 and row["wrong"] == row["failed"] == 0 for row in work)
    (tasks,) = (row for row in facts["rows"] if row["section"] == "tasks")
    assert tasks["samples a call"] == 32
    assert tasks["samples/s"] > 0
    (held,) = (row for row in facts["rows"] if row["section"] == "sessions held open")
    assert (held["answered right"], held["wrong"], held["failed"]) == (20, 0, 0)
    assert left_over() == []


def test_an_interrupted_bench_leaves_no_process() -> None:
    process = subprocess.Popen(
        [*COMMAND, "--seconds", "60", "--sessions", "0", "--tasks", "0"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "repeat 1" in line:
            break
    family = psutil.Process(process.pid).children(recursive=True)
    assert (
        len(family) >= 6
    )  # load, gateway and its worker, the directly called worker, and the fork server of both
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=patient(30)) == 130
    process.stderr.close()
    assert [
        one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE
    ] == []


async def test_a_run_of_sessions_at_once_ends_with_all_of_them_in_redis(
    tmp_path: Path, left_over: Callable[[], list[str]]
) -> None:
    pace = ScriptPace(tokens=16, tokens_per_round=4, round_s=0.0)
    files = (tmp_path, *write_model(tmp_path, engine_settings(pace)))
    found = await measure_at_once([12, 40], 2, pace, files, ("sessions.limit=40",))
    assert [one.scored for one in found] == [12, 40]
    assert [one.talk.told["turns"] for one in found] == [24, 80]
    assert [row["sessions"] for row in at_once_rows(found)] == [12, 40, 12, 40]
    assert all(goal.met for goal in at_once_goals(found))
    assert left_over() == []


async def test_later_turns_find_all_that_was_computed_and_get_the_tokens_of_a_gateway_without_cache(
    tmp_path: Path, left_over: Callable[[], list[str]]
) -> None:
    runs = await measure_turns(TurnPlan(turns=3, dialogues=3, tokens=128, repeats=1), tmp_path)
    cached, computed, ratio = turn_rows(runs)
    assert cached["dialogues"] == computed["dialogues"] == 3
    assert computed["with other tokens"] == 0
    assert (cached["turns that found all"], computed["turns that found all"]) == (1, 0)
    assert computed["share cached"] == 0
    assert all(turn.cached == turn.cacheable > 0 for turn in runs["as it is"][0].later)
    assert ratio["tokens/s"]
    assert turn_goals(runs)[0].met
    assert left_over() == []
