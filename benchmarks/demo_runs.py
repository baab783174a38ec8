"""Makes whole demo runs in their own processes and reads them from their files.

Finished runs are kept, so an interrupted bench continues where it stopped.
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
        """Optimiser steps and tokens of the drafter's training."""
        return self.summary["drafter_steps"], self.summary["drafter_tokens"]

    @property
    def last_third(self) -> Sequence[Mapping[str, Any]]:
        """The steps that benches compare."""
        return self.steps[-max(len(self.steps) // 3, 1) :]

    @property
    def rates(self) -> list[float]:
        """Rollout tokens per second of the last third of the steps."""
        return self.all_rates[-len(self.last_third) :]

    @property
    def all_rates(self) -> list[float]:
        """Rollout tokens per second of every step, the first steps of the run included."""
        return [int(step["response_tokens"]) / step["rollout_s"] for step in self.steps]

    @property
    def accept_length(self) -> float | None:
        """Mean of the probes in the last third; None if the arm has no probes."""
        first = len(self.steps) - len(self.last_third)
        values = [value for number, value in self.probes if number >= first]
        return statistics.fmean(values) if values else None

    @property
    def tokens_per_round(self) -> float:
        """Tokens per round and row in the rollouts of the last third.

        Rounds without a draft count; each gives one token. Unlike a probe's prompts, these prompts
        occur only once.
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
"""Makes words for `paceline demo`. This may take a while, for example to train a drafter."""


def words(*known: str) -> Flags:
    """Flags for words that need no preparation."""

    async def given() -> Sequence[str]:
        return known

    return given


NO_WORDS, WITHOUT = words(), words("--no-speculation")
"""No words, and the words of a run without speculation."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """A planned demo run: a seed, an arm and the arm's settings."""

    out: Path
    seed: int
    arm: str
    steps: int
    settings: Sequence[str]
    flags: Flags = NO_WORDS
    workload: Path | None = None  # file that replaces the demo's settings

    @property
    def directory(self) -> Path:
        """Directory of the run."""
        return self._folder / f"demo-{self.seed}-1"

    @property
    def resumes(self) -> bool:
        """Whether an earlier call began the run."""
        return (self.directory / "config.toml").is_file()

    @property
    def _folder(self) -> Path:
        return self.out / f"{self.arm}-{self.seed}"

    def is_finished(self) -> bool:
        """Whether the run is finished. Raises InvalidInput if the folder holds a run of another
        length.
        """
        if not (self.directory / "summary.json").is_file():
            return False
        summary = json.loads((self.directory / "summary.json").read_text(encoding="utf-8"))
        if summary["phase"] != "finished":  # it was interrupted
            return False
        if int(summary["steps"]) != self.steps:
            raise InvalidInput(
                "this folder holds runs of another length; choose another --out",
                seen=self.directory,
            )
        return True

    async def command(self) -> list[str]:
        """The command that makes the run or resumes it."""
        demo = [sys.executable, "-m", "paceline.cli.main", "demo", "--steps", str(self.steps)]
        demo += ["--out", str(self._folder)]
        if self.resumes:
            return [*demo, "--resume", self.directory.name, *self.settings]
        demo += ["--config", str(self.workload)] if self.workload else []
        return [*demo, "--seed", str(self.seed), *await self.flags(), *self.settings]

    def finish(self, cpu_s: float, resumed: bool) -> DemoRun:
        """Writes the run's CPU seconds beside it, and reads the run."""
        cost = {"cpu_s": cpu_s, "resumed": resumed}
        (self.directory / "bench.json").write_text(json.dumps(cost) + "\n")
        return self.read()

    def read(self) -> DemoRun:
        """Reads the finished run."""
        return read_run(self.directory, self.seed, self.arm)


async def finished_run(plan: DemoPlan) -> DemoRun:
    """Returns the finished run of a plan, and makes the run if it does not exist.

    Raises InvalidInput if the folder holds runs of another length, FailedPrecondition if a run
    fails.
    """
    if plan.is_finished():
        return plan.read()
    resumed = plan.resumes
    return plan.finish(await run_to_end(await plan.command()), resumed)


def read_run(directory: Path, seed: int, arm: str) -> DemoRun:
    """Reads a finished run from its files."""
    lines = (directory / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    cost_file = directory / "bench.json"
    cost = json.loads(cost_file.read_text(encoding="utf-8")) if cost_file.is_file() else {}
    cpu_s = None if cost.get("resumed", True) else float(cost["cpu_s"])
    return DemoRun(seed, arm, summary, [json.loads(line) for line in lines], cpu_s)


async def trained_drafter(made: Path, seed: int, steps: int, tokens: int, *options: str) -> Path:
    """Trains a drafter offline into the folder `made`, unless that folder holds a drafter.

    steps, tokens: totals of the training. options: further options of make_drafter. Returns `made`.
    """
    if not (made / "model.safetensors").is_file():
        budget = ["--steps", str(max(1, steps)), "--tokens", str(max(1, tokens))]
        script = demo_folder() / "make_drafter.py"
        where = ["--seed", str(seed), "--out", str(made)]
        await run_to_end([sys.executable, str(script), *budget, *where, *options])
    return made


def two_digits() -> Path:
    """Settings file of the workload with two-digit numbers.

    N-grams learn its tasks by heart, and a frozen drafter suffices.
    """
    return Path(__file__).parent / "workloads/two_digits/workload.toml"


def demo_folder() -> Path:
    """The folder examples/demo. Raises NotFound without a clone of the repository."""
    folder = Path(paceline.__file__).resolve().parents[2] / "examples/demo"
    if not (folder / "policy_trained").is_dir():
        raise NotFound("this bench needs a clone of the repository", seen=folder)
    return folder


async def run_to_end(command: Sequence[str], log: Path | None = None) -> float:
    """Runs a command to its end; its output passes through or goes to `log`.

    Returns the CPU seconds of the command and its children. Raises FailedPrecondition if it fails.
    """
    process = _started(command, log)
    try:
        _, status, usage = await asyncio.to_thread(os.wait4, process.pid, 0)
    except asyncio.CancelledError:
        process.terminate()  # harmless if a terminal has already sent the signal
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        shown = " ".join(command[:6])
        raise FailedPrecondition(
            f"a run failed; the same bench command resumes it: {shown} ...", seen=process.returncode
        )
    return usage.ru_utime + usage.ru_stime


def _started(command: Sequence[str], log: Path | None) -> subprocess.Popen[bytes]:
    if log is None:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
