"""Makes whole demo runs in processes of their own and reads them from their files.

Finished runs are kept, so a bench that was interrupted goes on where it stood.
"""

from __future__ import annotations

import asyncio
import json
import operator
import os
import statistics
import subprocess
import sys
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
    def drafter_budget(self) -> tuple[int, int]:
        """Optimiser steps and tokens that its drafter was trained with."""
        return self.summary["drafter_steps"], self.summary["drafter_tokens"]

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
    def tokens_per_round(self) -> float:
        """Of a row in its rollouts of the last third, rounds without a draft included, which give
        one token each. Unlike a probe's prompts, these come once.
        """
        tokens = sum(int(step["response_tokens"]) for step in self.last_third)
        drafted = [int(step.get("drafted_rounds", 0)) for step in self.last_third]
        lengths = [float(step.get("accept_length", 0.0)) for step in self.last_third]
        of_drafted = sum(map(operator.mul, drafted, lengths))
        return tokens / (sum(drafted) + tokens - of_drafted)

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


Flags = Callable[[], Awaitable[Sequence[str]]]
"""Words for `paceline demo` that may take a while to make, such as a drafter's path."""


def words(*known: str) -> Flags:
    """Those that are known beforehand."""

    async def given() -> Sequence[str]:
        return known

    return given


NO_WORDS, WITHOUT = words(), words("--no-speculation")
"""No words; a run without speculation."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """A demo run that is wanted: a seed, an arm, and what the arm sets."""

    out: Path
    seed: int
    arm: str
    steps: int
    settings: Sequence[str]
    flags: Flags = NO_WORDS
    workload: Path | None = None  # settings in the place of the demo's

    @property
    def directory(self) -> Path:
        """Directory of the run."""
        return self._folder / f"demo-{self.seed}-1"

    @property
    def resumes(self) -> bool:
        """Whether an earlier call has begun the run."""
        return (self.directory / "config.toml").is_file()

    @property
    def _folder(self) -> Path:
        return self.out / f"{self.arm}-{self.seed}"

    def is_finished(self) -> bool:
        """Whether it is there. Raises InvalidInput when the folder holds one of another length."""
        if not (self.directory / "summary.json").is_file():
            return False
        summary = json.loads((self.directory / "summary.json").read_text(encoding="utf-8"))
        if summary["phase"] != "finished":  # it was broken off
            return False
        if int(summary["steps"]) != self.steps:
            raise InvalidInput(
                "this folder holds runs of another length; choose another --out",
                seen=self.directory,
            )
        return True

    async def command(self) -> list[str]:
        """Makes the run, or the rest of it."""
        demo = [sys.executable, "-m", "paceline.cli.main", "demo", "--steps", str(self.steps)]
        demo += ["--out", str(self._folder)]
        if self.resumes:
            return [*demo, "--resume", self.directory.name, *self.settings]
        demo += ["--config", str(self.workload)] if self.workload else []
        return [*demo, "--seed", str(self.seed), *await self.flags(), *self.settings]

    def finish(self, cpu_s: float, resumed: bool) -> DemoRun:
        """Notes beside the run what it cost, and reads it."""
        cost = {"cpu_s": cpu_s, "resumed": resumed}
        (self.directory / "bench.json").write_text(json.dumps(cost) + "\n")
        return self.read()

    def read(self) -> DemoRun:
        """The finished run."""
        return read_run(self.directory, self.seed, self.arm)


async def finished_run(plan: DemoPlan) -> DemoRun:
    """The finished run of a plan, made now if it is not there.

    Raises InvalidInput when the folder holds runs of another length, FailedPrecondition when a run
    fails.
    """
    if plan.is_finished():
        return plan.read()
    resumed = plan.resumes
    return plan.finish(await run_to_end(await plan.command()), resumed)


def read_run(directory: Path, seed: int, arm: str) -> DemoRun:
    """A finished run from its files."""
    lines = (directory / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    cost_file = directory / "bench.json"
    cost = json.loads(cost_file.read_text(encoding="utf-8")) if cost_file.is_file() else {}
    cpu_s = None if cost.get("resumed", True) else float(cost["cpu_s"])
    return DemoRun(seed, arm, summary, [json.loads(line) for line in lines], cpu_s)


async def trained_drafter(made: Path, seed: int, steps: int, tokens: int, *options: str) -> Path:
    """Trains a drafter offline, with the total numbers of optimiser steps and tokens, and further
    options of make_drafter.
    """
    if not (made / "model.safetensors").is_file():
        budget = ["--steps", str(max(1, steps)), "--tokens", str(max(1, tokens))]
        script = demo_folder() / "make_drafter.py"
        where = ["--seed", str(seed), "--out", str(made)]
        await run_to_end([sys.executable, str(script), *budget, *where, *options])
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


async def run_to_end(command: Sequence[str], log: Path | None = None) -> float:
    """Run to the end, output passed through, or to `log`; returns the CPU-seconds it and its
    children used. Raises FailedPrecondition when it fails.
    """
    process = _started(command, log)
    try:
        _, status, usage = await asyncio.to_thread(os.wait4, process.pid, 0)
    except asyncio.CancelledError:
        process.terminate()  # once more is no harm where a terminal has told it already
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        shown = " ".join(command[:6])
        raise FailedPrecondition(
            f"a run failed; the same bench goes on from it: {shown} ...", seen=process.returncode
        )
    return usage.ru_utime + usage.ru_stime


def _started(command: Sequence[str], log: Path | None) -> subprocess.Popen[bytes]:
    if log is None:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
