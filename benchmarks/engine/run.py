"""Measures the embedded engine beside transformers: arms, bandits, rollouts, bf16, memory, and the
time by stage. In a gateway it measures the start and the cost of capture.

Everything but the gateways runs in one process. Compared ways take turns, and a pair's runs have
equal prompts and seeds, hence equal tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Awaitable, Callable

import torch

from benchmarks.demo_runs import demo_folder
from benchmarks.engine import compared, gateways, sections
from benchmarks.engine.pretrained import pretrained
from benchmarks.engine.promotions import promotions
from benchmarks.engine.sections import Extent, Findings
from benchmarks.options import above_zero, counts
from benchmarks.result import BenchResult, Goal, Row
from paceline.errors import InvalidInput

SECTIONS: dict[str, Callable[[Extent], Awaitable[Findings]]] = {
    "memory": compared.memory,  # first, while nothing else is resident
    "trained": sections.arms_and_bandits,
    "transformers": compared.beside_transformers,
    "start": sections.drafters_of_little_use,
    "injected": compared.injected_acceptance,
    "rollout": sections.rollouts,
    "groups": sections.rollouts_of_groups,
    "promotions": promotions,
    "bf16": compared.in_bf16,
    "threads": sections.more_threads,
    "profile": compared.profile,
    "pretrained": pretrained,
    "launch": gateways.launch,
    "capture": gateways.capture,
}
"""Sections in the order of their runs."""

BATCHES = (1, 4, 8, 16, 32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    option = parser.add_argument
    option("--pairs", type=above_zero(int), default=9, help="runs of each; a third without a goal")
    option("--batches", type=counts, default=BATCHES, help="batch sizes")
    option("--threads", type=above_zero(int), default=1, help="torch threads of both sides")
    option("--bandits", default="", help="kinds, e.g. epsilon_greedy,ucb; goals are the first's")
    some = f"of {', '.join(SECTIONS)}; again, or separated by commas, for another"
    option("--only", action="append", default=[], metavar="SECTION", help=some)
    option("--quick", action="store_true", help="one pair, batch 2, short: shows the form")


async def run(options: argparse.Namespace) -> BenchResult:
    """Runs the sections one after the other.

    Raises InvalidInput for options out of range, NotFound outside a clone.
    """
    wanted = chosen_sections(",".join(options.only))
    plan = plan_of(options)
    rows: list[Row] = []
    goals: list[Goal] = []
    before = torch.get_num_threads()
    try:
        for name in wanted:
            found = await SECTIONS[name](plan)
            rows += found.rows
            goals += found.goals
    finally:
        torch.set_num_threads(before)

    threads = f"{plan.threads} thread{'s' if plan.threads > 1 else ''}"
    return BenchResult(
        f"embedded engine, CPU, {threads}, medians of {plan.pairs} pairs", rows, goals
    )


def chosen_sections(text: str) -> list[str]:
    """Sections of a comma-separated list, in the order of their runs; all sections for an empty
    list.

    Raises InvalidInput for an unknown section.
    """
    named = set(text.split(",")) if text else set(SECTIONS) - {"pretrained"}  # a model to fetch
    if not named <= set(SECTIONS):
        raise InvalidInput("no such section", seen=text, allowed=", ".join(SECTIONS))
    return [name for name in SECTIONS if name in named]


def plan_of(options: argparse.Namespace) -> Extent:
    """Makes the extent from the options. Raises NotFound outside a clone."""
    plan = Extent(demo_folder(), options.threads, options.pairs, options.batches)
    if options.bandits:
        plan = dataclasses.replace(plan, bandits=tuple(options.bandits.split(",")))
    return (
        dataclasses.replace(plan, pairs=1, batches=(2,), max_tokens=12, quick=True)
        if options.quick
        else plan
    )
