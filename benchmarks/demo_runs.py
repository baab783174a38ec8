"""Makes whole demo runs in processes of their own and reads them from their files.

Finished runs are kept, so a bench that was interrupted goes on where it stood.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.errors import FailedPrecondition, InvalidInput, NotFound

PROBE = "accept_length_probe"


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One finished run."""

    seed: int
    arm: str
    summary: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]  # records, by step
    cpu_s: float | None  # of all its processes; None when it was not measured

    @property
    def last_third(self) -> Sequence[Mapping[str, Any]]:
        """The steps that are compared."""
        return self.steps[-max(len(self.steps) // 3, 1) :]

    @property
    def rates(self) -> list[float]:
        """Rollout tokens per second of the last third of the steps."""
        return self.all_rates[-len(self.last_third) :]

    @property
    def all_rates(self) -> list[float]:
        """Rollout tokens per second of every step, those with which a run begins included."""
        return [int(step["response_tokens"]) / step["rollout_s"] for step in self.steps]

    @property
    def accept_length(self) -> float | None:
        """Mean of the probes in the last third; None when the arm cannot be probed."""
        first = len(self.steps) - len(self.last_third)
        values = [value for number, value in self.probes if number >= first]
        return statistics.fmean(values) if values else None

    @property
    def probes(self) -> list[tuple[int, float]]:
        """RL step and acceptance length of each probe."""
        found = (
            (int(step.get("step", 0)), step.get("evaluations", {}).get(PROBE))
            for step in self.steps
        )
        return [(number, float(value)) for number, value in found if value is not None]

    @property
    def rise(self) -> float:
        """Rise of held-out accuracy over the run."""
        return float(self.summary["accuracy_last"] - self.summary["accuracy_first"])


async def finished_run(
    out: Path,
    seed: int,
    arm: str,
    steps: int,
    flags: Callable[[], Awaitable[Sequence[str]]],
    overrides: Sequence[str],
    workload: Path | None = None,
) -> DemoRun:
    """The finished run of a seed and an arm, made now with the demo's `flags` and settings if it is
    not there. `workload`: settings in the place of the demo's.

    Raises InvalidInput when the folder holds runs of another length, FailedPrecondition when a run
    fails.
    """
    folder, run_id = out / f"{arm}-{seed}", f"demo-{seed}-1"
    directory = folder / run_id
    if _finished_steps(directory) not in (None, steps):
        raise InvalidInput(
            "this folder holds runs of another length; choose another --out", seen=directory
        )

    if _finished_steps(directory) is None:
        resumed = (directory / "config.toml").is_file()
        chosen = ["--resume", run_id] if resumed else ["--seed", str(seed), *await flags()]
        began = time.monotonic()
        where = ["--steps", str(steps), "--out", str(folder)]
        where += ["--config", str(workload)] if workload and not resumed else []
        demo = [sys.executable, "-m", "paceline.cli.main", "demo", *where]
        cpu_s = await run_to_end([*demo, *chosen, *overrides])
        cost = {"cpu_s": cpu_s, "wall_s": time.monotonic() - began, "resumed": resumed}
        (directory / "bench.json").write_text(json.dumps(cost) + "\n")

    return read_run(directory, seed, arm)


def read_run(directory: Path, seed: int, arm: str) -> DemoRun:
    """A finished run from its files."""
    lines = (directory / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    cost_file = directory / "bench.json"
    cost = json.loads(cost_file.read_text(encoding="utf-8")) if cost_file.is_file() else {}
    cpu_s = None if cost.get("resumed", True) else float(cost["cpu_s"])
    return DemoRun(seed, arm, summary, [json.loads(line) for line in lines], cpu_s)


def _finished_steps(directory: Path) -> int | None:
    """RL steps of a finished run; None when there is none."""
    if not (directory / "summary.json").is_file():
        return None
    return int(json.loads((directory / "summary.json").read_text(encoding="utf-8"))["steps"])


async def trained_drafter(
    made: Path, seed: int, like: DemoRun, *options: str, before: tuple[int, int] = (0, 0)
) -> Path:
    """A drafter trained offline with the optimiser steps and tokens that `like` spent, and those
    `before` it; further make_drafter options.
    """
    if not (made / "model.safetensors").is_file():
        steps, tokens = (
            str(max(1, spent + like.summary[f"drafter_{count}"]))
            for count, spent in zip(("steps", "tokens"), before, strict=True)
        )
        budget = ["--steps", steps, "--tokens", tokens, "--seed", str(seed), "--out", str(made)]
        script = demo_folder() / "make_drafter.py"
        await run_to_end([sys.executable, str(script), *budget, *options])
    return made


def two_digits() -> Path:
    """Settings of the workload on which n-grams learn the task by heart and a frozen drafter
    suffices.
    """
    return Path(__file__).parent / "workloads/two_digits/workload.toml"


def demo_folder() -> Path:
    """examples/demo; NotFound without it."""
    folder = Path(paceline.__file__).resolve().parents[2] / "examples/demo"
    if not (folder / "policy_trained").is_dir():
        raise NotFound("this bench needs a clone of the repository", seen=folder)
    return folder


async def run_to_end(command: Sequence[str]) -> float:
    """Run to the end, output passed through; returns the CPU-seconds it and its children used."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
    if await process.wait() != 0:
        shown = " ".join(command[:6])
        raise FailedPrecondition(
            f"a run failed; the same bench goes on from it: {shown} ...", seen=process.returncode
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
