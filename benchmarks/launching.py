"""Times whole demo runs by both launchers: until all services serve, until the end, and from a
death until the service is healthy again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.demo_runs import demo_folder
from benchmarks.result import Goal, Row, at_most, say
from paceline.errors import FailedPrecondition

LOCAL, RAY = "local", "ray"
DEARER_AT_MOST = 1.10
"""Goal for the wall time of a run on Ray over the wall time of a local run."""
_KILLED = "policy_trainer"
_DEATHS = {LOCAL: ("process",), RAY: ("process", "keeper")}


@dataclass(slots=True)
class LaunchedRun:
    """Times of a run, in seconds since its command began."""

    serving_s: float = 0.0
    ended_s: float = 0.0
    recovered_s: dict[str, float] = field(default_factory=dict)  # by kind of death


async def launches(steps: int, pairs: int) -> tuple[list[Row], list[Goal]]:
    """Makes rows and goals of `pairs` of runs; the launchers take turns.

    One more run of each launcher measures the recovery from deaths.
    """
    runs: dict[str, list[LaunchedRun]] = {LOCAL: [], RAY: []}
    for pair in range(pairs):
        for launcher in (LOCAL, RAY) if pair % 2 == 0 else (RAY, LOCAL):
            runs[launcher].append(await _timed(launcher, steps, ()))
            say(f"pair {pair}, {launcher}: {runs[launcher][-1].ended_s:.0f} s")
    rows = []
    for launcher, of in runs.items():
        died = await _timed(launcher, 8, _DEATHS[launcher])
        recovered = {death: died.recovered_s.get(death, "") for death in _DEATHS[RAY]}
        row: Row = {
            "section": "launchers",
            "launcher": launcher,
            "s until it serves": statistics.median(one.serving_s for one in of),
            f"s of {steps} steps, all in all": statistics.median(one.ended_s for one in of),
            **{f"s from the death of a {death}": s for death, s in recovered.items()},
        }
        rows.append(row)
    ratios = [
        on_ray.ended_s / local.ended_s for on_ray, local in zip(runs[RAY], runs[LOCAL], strict=True)
    ]
    name = f"wall time of {steps} steps on Ray over that without"
    return rows, [at_most(name, DEARER_AT_MOST, statistics.median(ratios))]


async def _timed(launcher: str, steps: int, deaths: Sequence[str]) -> LaunchedRun:
    """Times a demo, and causes one death after another at its steps.

    Raises FailedPrecondition if the demo fails.
    """
    run, left, died_at = LaunchedRun(), list(deaths), 0.0
    pids: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as out:
        words = ["--steps", str(steps), "--out", out, "--launcher", launcher]
        async for at_s, fact in _facts(words):
            kind, name, event = fact["kind"], fact.get("name"), fact.get("event")
            if kind == "serving":
                run.serving_s = at_s
            elif kind == "step" and left and not died_at:
                died_at = at_s
                _kill(left[0], pids[_KILLED])
            elif kind == "process" and event in ("started", "restarted"):
                pids[str(name)] = int(fact["pid"])
            elif event == "healthy" and name == _KILLED and died_at:
                run.recovered_s[left.pop(0)] = at_s - died_at
                died_at = 0.0
            run.ended_s = at_s
    return run


async def _facts(words: Sequence[str]) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Yields each fact that a demo prints, with its time in seconds."""
    loop = asyncio.get_running_loop()
    command = [sys.executable, "-m", "paceline.cli.main", "demo", "--lines", "json", *words]
    began = loop.time()
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=demo_folder().parents[1],
        limit=1 << 24,
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            yield loop.time() - began, json.loads(line)
        if await process.wait():
            raise FailedPrecondition("a run failed", seen=" ".join(words))
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def _kill(what: str, pid: int) -> None:
    """Kills the process of a service, or the keeper that is its parent."""
    parent = psutil.Process(pid).ppid()
    os.kill(pid if what == "process" else parent, signal.SIGKILL)
