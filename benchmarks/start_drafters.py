"""Trains the drafters that whole runs start from, offline and once for all seeds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import demo_runs
from paceline.cli.run_files import merged

REAL = Path(__file__).parents[1] / "examples/real/real.toml"
"""Settings of the run on the pretrained model, with answers of up to 24 tokens."""
REASONING = Path(__file__).parent / "workloads/reasoning/workload.toml"
"""The same model and tasks, with answers of up to 256 tokens."""
START_STEPS, BATCH_TOKENS = 2_000, 256
"""Optimiser steps of the demo's start drafter, and tokens of each step; see its make_drafter.py.
The steps of a co-trained drafter have the same size.
"""
REAL_ANSWERS, REAL_BATCH_TOKENS, REAL_RATE = 512, 1_024, "2e-3"
"""Answers of the pretrained model that its frozen drafter learns from, tokens of each step, and
learning rate.
"""


async def demo_drafter(options: argparse.Namespace, out: Path, steps: int) -> Path:
    """Trains a drafter of the demo's start policy, once for all seeds, with `steps` more steps than
    the demo's start drafter; returns its path.
    """
    trained = START_STEPS + steps
    folder = out / f"drafter-{trained}"
    return await demo_runs.trained_drafter(folder, 0, trained, trained * BATCH_TOKENS)


async def dflash_drafter(out: Path) -> Path:
    """Trains a DFlash drafter for as long as the demo's start drafter; returns its path."""
    budget = (START_STEPS, START_STEPS * BATCH_TOKENS)
    return await demo_runs.trained_drafter(
        out / "drafter-dflash", 0, *budget, "--speculator", "dflash"
    )


def _real_settings(
    file: Path, options: argparse.Namespace, folder: Path
) -> tuple[str, Mapping[str, Any]]:
    """The pretrained model's directory and the coordinator's settings; makes the folder."""
    tree = merged([file], options.overrides)
    folder.mkdir(parents=True, exist_ok=True)
    return str(Path(tree["gateway"]["model"]).expanduser()), tree["coordinator"]


async def real_drafter(file: Path, options: argparse.Namespace, out: Path, steps: int) -> Path:
    """Trains a drafter on the pretrained model's answers to the tasks of a settings file, once for
    all seeds; returns its path.
    """
    done = out / f"drafter-{steps}"
    if not done.is_dir():
        folder = done.with_suffix(".part")
        directory, coordinator = _real_settings(file, options, folder)
        model = ("--model", directory)
        answers = await _real_answers(folder, model, coordinator)
        tokens = str(REAL_BATCH_TOKENS)
        sizes = ["--steps", str(steps), "--batch-tokens", tokens, "--row-tokens", tokens]
        sizes += ["--lr", REAL_RATE, "--options", "norms=true"]
        places = ("--data", str(answers), *model, "--out", str(folder))
        command = (sys.executable, "-m", "paceline.cli.main", "drafter", "train")
        await demo_runs.run_to_end([*command, *places, *sizes])  # resumes a stopped training
        folder.rename(done)
    return done / "checkpoint/speculator"


async def _real_answers(folder: Path, model: Sequence[str], settings: Mapping[str, Any]) -> Path:
    """Answers to the run's tasks, in a file of the folder. `settings`: the coordinator's."""
    answers = folder / "answers.jsonl"
    if not answers.is_file():
        unfinished = folder / "answers.part"
        tasks = ("--tasks", settings["tasks_path"], "--system", settings["system_prompt"])
        longest = str(settings["sampling"]["max_tokens"])
        sizes = ("--answers", str(REAL_ANSWERS), "--max-tokens", longest)
        script = str(demo_runs.demo_folder() / "make_drafter.py")
        words = (*model, *tasks, *sizes, "--only-answers", str(unfinished))
        await demo_runs.run_to_end([sys.executable, script, *words])
        unfinished.rename(answers)
    return answers
