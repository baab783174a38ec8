"""Times the float32 products of a layer on one core, by our choice of kernel and by torch's own.

It times products of activations alone, as in an engine, and with gradients, as in a trainer's step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.result import BenchResult, Goal, Row, paired_ratio, ratio_goal
from paceline.models import products

LAYER = ((128, 256), (128, 128), (128, 704), (352, 128))
"""Inputs and outputs of the matrices of a layer of the demo's policy."""
ROWS = (1, 8, 16, 24, 32, 64, 128, 256, 1024, 4096)
FLOPS_A_TIMING = 4e8  # enough work to make the clock's resolution negligible
NEVER_SLOWER = 0.97
Product = Callable[[Tensor, Tensor], Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--pairs", type=int, default=15, help="timings of either side")


async def run(options: argparse.Namespace) -> BenchResult:
    """Times every number of rows, forward and with gradients."""
    torch.set_num_threads(1)
    rows, goals = list[Row](), list[Goal]()
    for trains in (False, True):
        for count in ROWS:
            row, goal = measured(count, options.pairs, trains=trains)
            rows.append(row)
            goals.append(goal)
    return BenchResult(f"products of a layer, oneDNN requested: {products.ONEDNN}", rows, goals)


def measured(count: int, pairs: int, *, trains: bool) -> tuple[Row, Goal]:
    """Times one number of rows; both sides take turns."""
    work = [_matrices(count, *shape, trains=trains) for shape in LAYER]
    flops = (6 if trains else 2) * count * sum(k * n for k, n in LAYER)
    repeats = max(1, int(FLOPS_A_TIMING / flops))
    sides: dict[Product, list[float]] = {products.linear: [], functional.linear: []}
    for _ in range(pairs + 1):  # the first pair warms up
        for side, seconds in sides.items():
            seconds.append(_timed(side, work, repeats))
    ours, theirs = (seconds[1:] for seconds in sides.values())
    ratio = paired_ratio([1 / one for one in ours], [1 / one for one in theirs])
    step = "with gradients" if trains else "forward"
    rates = [f"{flops / sorted(side)[len(side) // 2] / 1e9:.0f}" for side in (ours, theirs)]
    row: Row = {
        "step": step,
        "rows": count,
        "GFLOP/s": rates[0],
        "torch's GFLOP/s": rates[1],
        "ratio": str(ratio),
    }
    return row, ratio_goal(f"{step}, {count} rows", NEVER_SLOWER, ratio)


def _matrices(
    rows: int, inputs: int, outputs: int, *, trains: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    if not trains:
        return x, weight, None
    return x.requires_grad_(), weight.requires_grad_(), torch.randn(rows, outputs)


def _timed(
    side: Product, work: Sequence[tuple[Tensor, Tensor, Tensor | None]], repeats: int
) -> float:
    """Seconds of all matrices once."""
    began = time.perf_counter()
    for _ in range(repeats):
        for x, weight, gradient in work:
            product = side(x, weight)
            if gradient is not None:
                torch.autograd.grad(product, (x, weight), gradient)
    return (time.perf_counter() - began) / repeats
