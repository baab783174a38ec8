"""Measures how fast a drafter adapts to a new policy, by the settings of its training.

The demo's start drafter learns from the trained policy's answers. Every setting changes one or two
options of the first setting. Acceptance is the mean accepted length on held-out answers, with up to
five drafts, after a number of optimiser steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import demo_runs
from benchmarks.demo_runs import demo_folder
from benchmarks.options import above_zero
from benchmarks.result import BenchResult, Goal, Row, at_least, say
from paceline.errors import InvalidInput

BASE = "Muon, lr 2.5e-3, 3 iterations, averaged by 0.98"
SETTINGS: Mapping[str, Mapping[str, str]] = {
    BASE: {},
    "lr 8e-4": {"--lr": "8e-4"},
    "lr 1.6e-3": {"--lr": "1.6e-3"},
    "lr 3.5e-3": {"--lr": "3.5e-3"},
    "lr 5e-3": {"--lr": "5e-3"},
    "2 iterations": {"--iterations": "2"},
    "5 iterations": {"--iterations": "5"},
    "not averaged": {"--average": "0"},
    "averaged by 0.95": {"--average": "0.95"},
    "averaged by 0.99": {"--average": "0.99"},
    "AdamW": {"--optimizer": "adamw"},
    "AdamW, not averaged": {"--optimizer": "adamw", "--average": "0"},
    "clip 2": {"--clip-norm": "2"},
    "warm-up 20": {"--warmup-steps": "20"},
    "512 tokens a step": {"--batch-tokens": "512", "--row-tokens": "512"},
    "features 5 times": {"--options": "feature_weight=5.0"},
    "tokens 10 times": {"--options": "token_weight=1.0"},
    "chains of 3 drafts": {"--options": "ttt_steps=3"},
    "norms": {"--options": "norms=true"},
}
"""Options of `paceline drafter train` that replace options in BASE_OPTIONS."""
COMMON = ("--heldout-share", "0.1")
BASE_OPTIONS = {
    "--lr": "2.5e-3",
    "--clip-norm": "0.5",
    "--warmup-steps": "0",
    "--batch-tokens": "256",
    "--row-tokens": "256",
}
AT_ONCE = 2
NEAR_BEST = 0.98


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--seeds", type=above_zero(int), default=3, help="seeds 0 .. N-1")
    parser.add_argument("--steps", type=above_zero(int), default=400, help="optimiser steps")
    parser.add_argument("--answers", type=above_zero(int), default=1500, help="to learn from")
    parser.add_argument(
        "--settings",
        default=";".join(SETTINGS),
        help="settings to train with, separated by semicolons",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench-adaptation"), help="folder of the runs"
    )


async def run(options: argparse.Namespace) -> BenchResult:
    """Trains with every setting and seed, two trainings at a time; keeps finished trainings.

    Raises InvalidInput for an unknown setting.
    """
    wanted = options.settings.split(";")
    if unknown := [one for one in wanted if one not in SETTINGS]:
        raise InvalidInput("no such setting", seen=unknown[0], allowed="; ".join(SETTINGS))
    out = options.out.absolute()
    data = await _answers(out, options.answers)
    room = asyncio.Semaphore(AT_ONCE)

    async def one(name: str, seed: int) -> dict[int, float]:
        async with room:
            found = await _learned(out, data, name, seed, options.steps)
            say(f"{name}, seed {seed}: {max(found.items())[1]:.3f}")
            return found

    lengths = {
        name: await asyncio.gather(*(one(name, seed) for seed in range(options.seeds)))
        for name in wanted
    }
    return compare(lengths)


def compare(lengths: Mapping[str, Sequence[Mapping[int, float]]]) -> BenchResult:
    """Makes a row for each setting: held-out E[len] by seed and optimiser step."""
    rows: list[Row] = []
    medians: dict[str, float] = {}
    for name, seeds in lengths.items():
        last = max(seeds[0])
        medians[name] = statistics.median(one[last] for one in seeds)
        row: dict[str, str | float | int | None] = {"settings": name}
        for step in sorted(seeds[0]):
            row[f"{step} steps"] = " ".join(f"{one[step]:.2f}" for one in seeds)
        rows.append({**row, "median": medians[name]})
    goals: list[Goal] = []
    if BASE in medians:
        best = max(medians.values())
        goals.append(at_least("E[len] of the demo's settings", NEAR_BEST * best, medians[BASE]))
    return BenchResult("how fast a drafter adapts", rows, goals)


async def _answers(out: Path, count: int) -> Path:
    """The trained policy's answers to training tasks, in the format of `paceline drafter train`."""
    path = out / f"answers-{count}.jsonl"
    if not path.is_file():
        await asyncio.to_thread(out.mkdir, parents=True, exist_ok=True)
        script = str(demo_folder() / "make_drafter.py")
        where = ["--model", str(demo_folder() / "policy_trained"), "--only-answers", str(path)]
        await demo_runs.run_to_end([sys.executable, script, "--answers", str(count), *where])
    return path


async def _learned(out: Path, data: Path, name: str, seed: int, steps: int) -> dict[int, float]:
    """Held-out E[len] by optimiser step; trains first if the log lacks the last step."""
    folder = out / f"{name.replace(' ', '_').replace(',', '')}-{seed}-{steps}"
    log = folder / "log.jsonl"
    found = _lengths(log)
    if steps not in found:
        policy, start = demo_folder() / "policy_trained", demo_folder() / "drafter_start"
        places = ["--data", str(data), "--model", str(policy), "--out", str(folder)]
        length = ["--from", str(start), "--seed", str(seed), "--steps", str(steps)]
        often = ["--eval-every", str(max(1, steps // 4)), "--save-every", str(steps)]
        words = [word for pair in {**BASE_OPTIONS, **SETTINGS[name]}.items() for word in pair]
        command = [sys.executable, "-m", "paceline.cli.main", "drafter", "train"]
        await demo_runs.run_to_end([*command, *places, *length, *COMMON, *often, *words])
        found = _lengths(log)
    return found


def _lengths(log: Path) -> dict[int, float]:
    if not log.is_file():
        return {}
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return {one["step"]: one["heldout"]["length"] for one in lines if "heldout" in one}
