"""Compares a step of the policy trainer with a plain loop over the same model: transformers, padded
batches sorted by length, AdamW.

Both train the same batch, in processes that take turns. The trainer has 1 and 2 ranks; the plain
loop has as many threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.options import above_zero, not_negative
from benchmarks.policy.checkpoints import checkpointed
from benchmarks.policy.work import (
    SPEC_VARIABLE,
    WIDE_VOCABULARY,
    Work,
    demo_model,
    demo_samples,
    random_samples,
    wide_model,
)
from benchmarks.result import BenchResult, Goal, Ratio, Row, at_most, paired_ratio, ratio_goal, say
from paceline.ranks.group import RankGroup

START_S = STEP_S = 300.0
DEMO_RATIO = 1.6
"""Goal for the speed over the plain loop, on the demo's samples."""
WIDE = "a head of 152k, 1 rank"


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a batch and a number of ranks."""

    name: str
    model: Path
    work: Work
    ranks: int
    least: float = DEMO_RATIO
    row_tokens: int = 0  # of our side; 0: chosen by the batch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument(
        "--pairs",
        type=above_zero(int),
        default=15,
        help="steps of either side; a fifth as many with the head of 152k",
    )
    parser.add_argument(
        "--only", choices=["steps", "checkpoints"], default="", help="leave the other part out"
    )
    parser.add_argument(
        "--tokens",
        type=not_negative(int),
        default=0,
        help="of a forward of either side, padding included; 0: the fastest for each",
    )


async def run(options: argparse.Namespace) -> BenchResult:
    """Runs all cases, one after the other."""
    found: list[tuple[Row, list[Goal]]] = []
    few = max(3, options.pairs // 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        everything = cases(folder)
        for case in everything if options.only != "checkpoints" else ():
            pairs = few if case.name == WIDE else options.pairs
            row, ratio = await compared(case, pairs, folder / "logs", options.tokens)
            found.append((row, _goals(case, row, ratio)))
            say(f"{case.name}: {ratio}")
        for case in (*everything[:2], everything[-1]) if options.only != "steps" else ():
            row, goal = await checkpointed(
                case.name, case.model, case.work, case.ranks, few, folder / case.name
            )
            found.append((row, [goal]))
            say(f"{case.name}: a checkpoint holds the ranks for {row['stall of a step']} of a step")
    rows, goals = [row for row, _ in found], [goal for _, some in found for goal in some]
    return BenchResult("a step of the policy trainer beside a plain loop", rows, goals)


def _goals(case: Case, row: Row, ratio: Ratio) -> list[Goal]:
    speed = ratio_goal(f"tokens/s over a plain loop, {case.name}", case.least, ratio)
    if case.name != WIDE:
        return [speed]
    memory = float(row["MiB"] or 0) / float(row["MiB plain"] or 1)
    return [speed, at_most(f"peak memory over a plain loop's, {case.name}", 1.0, memory)]


def cases(folder: Path) -> list[Case]:
    """The compared cases."""
    demo = demo_model()
    start, late, apart, wide = (
        str(demo_samples(folder / "start.json", 16)),
        str(demo_samples(folder / "late.json", 16, "policy_trained", longest=360)),
        str(random_samples(folder / "apart.json", 16, 320)),
        str(random_samples(folder / "wide.json", 4, WIDE_VOCABULARY)),
    )
    return [
        Case("the demo's first step, 1 rank", demo, Work(start), 1),
        Case("the demo's first step, 2 ranks", demo, Work(start), 2),
        Case("half of its groups without variance, 2 ranks", demo, Work(start, still=8), 2),
        Case("its last step, 2 ranks", demo, Work(late), 2),
        Case("the same in rows of 128 tokens, 2 ranks", demo, Work(late), 2, 1.0, 128),
        Case("answers that share the prompt alone, 1 rank", demo, Work(apart), 1, least=1.0),
        Case(WIDE, wide_model(folder / "wide"), Work(wide), 1, least=1.0),
    ]


async def compared(case: Case, pairs: int, logs: Path, budget: int = 0) -> tuple[Row, Ratio]:
    """Measures a case, both sides in turns. Raises RankLost if a rank dies."""
    tokens = sum(len(one.token_ids) for one in case.work.trajectories())
    async with AsyncExitStack() as stack:
        ours = await _started(stack, case, "ours", logs, budget)
        plain = await _started(stack, case, "plain", logs, budget)
        for side in (ours, plain):
            await _step(side)  # the first one allocates
        timed = [(await _step(ours), await _step(plain)) for _ in range(pairs)]
    mine, theirs = zip(*timed, strict=True)
    ratio = paired_ratio([one[0] for one in theirs], [one[0] for one in mine])
    row: Row = {
        "case": case.name,
        "tokens": tokens,
        "tokens/s": tokens / statistics.median(one[0] for one in mine),
        "tokens/s plain": tokens / statistics.median(one[0] for one in theirs),
        "ratio": str(ratio),
        "MiB": max(one[1] for one in mine),
        "MiB plain": max(one[1] for one in theirs),
    }
    return row, ratio


async def _started(
    stack: AsyncExitStack, case: Case, side: str, logs: Path, budget: int
) -> RankGroup:
    told = {"side": side, "model": str(case.model), "work": asdict(case.work)}
    spec = json.dumps({**told, "tokens": budget, "row_tokens": case.row_tokens})
    ranks, threads = (case.ranks, 1) if side == "ours" else (1, case.ranks)
    group = RankGroup(
        "benchmarks.policy.side", ranks, threads, logs / side, {SPEC_VARIABLE: spec}, heartbeat_s=0
    )
    await stack.enter_async_context(group)
    await group.start(START_S)
    return group


async def _step(group: RankGroup) -> tuple[float, float]:
    """Seconds of the slowest rank, and the sum of the ranks' peak memory (MiB)."""
    group.send(b"step")
    told = [json.loads((await group.receive(STEP_S))[1]) for _ in group.pids]
    return max(one["seconds"] for one in told), sum(one["peak_mib"] for one in told)
