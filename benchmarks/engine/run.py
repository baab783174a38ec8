"""The embedded engine beside transformers: arms, bandits, rollouts, bf16, memory, and where the
time goes.

One process; ways that are compared take turns, and a pair's runs have equal prompts and seeds,
hence equal tokens. Owns the options and the order of the sections (engine_sections.py,
engine_compared.py).
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from benchmarks.result import BenchResult, Goal, Row
from benchmarks.sglang import demo_folder
from paceline.errors import InvalidInput

if TYPE_CHECKING:
    from benchmarks.engine.sections import Plan

SECTIONS = (
    "memory",
    "trained",
    "transformers",
    "start",
    "injected",
    "rollout",
    "bf16",
    "threads",
    "profile",
)
"""In the order in which they run; memory comes first, while nothing else is resident."""

BATCHES = (1, 4, 8, 16, 32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument(
        "--pairs", type=int, default=9, help="runs of each way; a third of it without a goal"
    )
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="batch sizes")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both sides")
    parser.add_argument(
        "--bandits", default="", help="kinds, e.g. epsilon_greedy,ucb; goals are the first one's"
    )
    parser.add_argument(
        "--only", default="", metavar="SECTION", help=f"some of {', '.join(SECTIONS)}"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one pair, batch 2, short: shows the form, not the speed",
    )


async def run(options: argparse.Namespace) -> BenchResult:
    """The sections one after the other.

    Raises InvalidInput for options, NotFound outside a clone.
    """
    wanted = chosen_sections(options.only)
    plan = plan_of(options)
    # torch and transformers load here, so that the other benches of this package start without
    # them.
    import torch

    from benchmarks.engine import compared as engine_compared
    from benchmarks.engine import sections as engine_sections

    sections = {
        "memory": engine_compared.memory,
        "trained": engine_sections.arms_and_bandits,
        "transformers": engine_compared.beside_transformers,
        "start": engine_sections.drafters_of_little_use,
        "injected": engine_compared.injected_acceptance,
        "rollout": engine_sections.rollouts,
        "bf16": engine_compared.in_bf16,
        "threads": engine_sections.more_threads,
        "profile": engine_compared.profile,
    }
    rows: list[Row] = []
    goals: list[Goal] = []
    before = torch.get_num_threads()
    try:
        for name in wanted:
            found = await sections[name](plan)
            rows += found.rows
            goals += found.goals
    finally:
        torch.set_num_threads(before)
    threads = f"{plan.threads} thread{'s' if plan.threads > 1 else ''}"
    return BenchResult(
        f"embedded engine, CPU, {threads}, medians of {plan.pairs} pairs", rows, goals
    )


def chosen_sections(text: str) -> list[str]:
    """Sections of a comma-separated list in the order in which they run; empty: all.

    Raises InvalidInput.
    """
    named = set(text.split(",")) if text else set(SECTIONS)
    if not named <= set(SECTIONS):
        raise InvalidInput("no such section", seen=text, allowed=", ".join(SECTIONS))
    return [name for name in SECTIONS if name in named]


def plan_of(options: argparse.Namespace) -> Plan:
    """What the options ask for. Raises InvalidInput naming the option, NotFound outside a clone."""
    from benchmarks.engine.sections import Plan

    for name in ("pairs", "threads"):
        if getattr(options, name) < 1:
            raise InvalidInput(
                f"--{name} is too small", seen=getattr(options, name), allowed=">= 1"
            )
    plan = Plan(demo_folder(), options.threads, options.pairs, batch_sizes(options.batches))
    if options.bandits:
        plan = dataclasses.replace(plan, bandits=tuple(options.bandits.split(",")))
    return (
        dataclasses.replace(plan, pairs=1, batches=(2,), max_tokens=12, quick=True)
        if options.quick
        else plan
    )


def batch_sizes(text: str) -> tuple[int, ...]:
    """Ascending sizes of a comma-separated list. Raises InvalidInput."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise InvalidInput("--batches takes sizes", seen=text, allowed="e.g. 1,4,8")
    return tuple(sorted({int(part) for part in parts}))
