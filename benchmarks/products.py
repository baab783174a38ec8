"""Times the float32 products of a layer on one core, by our choice of kernel and by torch's own.

It times products of activations alone, as in an engine, and with gradients, as in a trainer's step.
With --model it times whole decoding rounds of a model, in the forms measured for its matrices and
in torch's form, and the engine's prefills and rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.prefills import engine_times
from benchmarks.result import BenchResult, Goal, Row, paired_ratio, ratio_goal
from paceline.models import decoder, products
from paceline.models.cache import StaticCache
from paceline.models.config import read_config
from paceline.models.decoder import DecoderWeights
from paceline.models.in_place import ServedModel
from paceline.models.loading import DTYPES

LAYER = ((128, 256), (128, 128), (128, 704), (352, 128))
"""Inputs and outputs of the matrices of a layer of the demo's policy."""
ROWS = (1, 8, 16, 24, 32, 64, 128, 256, 1024, 4096)
FLOPS_A_TIMING = 4e8  # enough work to make the clock's resolution negligible
NEVER_SLOWER = 0.97
SHAPES = ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (1, 5))
"""Batches and tokens of each row; five tokens are a verification of four drafts."""
CONTEXT = 128
Product = Callable[[Tensor, Tensor], Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--pairs", type=int, default=15, help="timings of either side")
    parser.add_argument("--model", type=Path, help="times a model's prefills and rounds instead")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")


async def run(options: argparse.Namespace) -> BenchResult:
    """Times every number of rows, forward and with gradients, or the rounds of a model."""
    torch.set_num_threads(options.threads)
    if options.model is not None:
        rounds = decoding_rounds(options.model, DTYPES[options.dtype], options.pairs)
        rows, goals = engine_times(options.model, options.dtype, options.pairs)
        return replace(rounds, rows=[*rounds.rows, *rows], goals=[*rounds.goals, *goals])
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


@torch.inference_mode()
def decoding_rounds(model: Path, dtype: torch.dtype, pairs: int) -> BenchResult:
    """Times rounds of the decoder and its head: in the measured forms, and in torch's alone."""
    config = read_config(model)
    weights = ServedModel(config, dtype, CONTEXT + max(tokens for _, tokens in SHAPES)).load(model)
    rows, goals = list[Row](), list[Goal]()
    for batch, tokens in SHAPES:
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(pairs + 1):  # the first pair warms up
            for measured, timed in seconds.items():
                with nullcontext() if measured else _torch_forms():
                    timed.append(_round(weights, batch, tokens))
        ours, theirs = (one[1:] for one in seconds.values())
        ratio = paired_ratio([1 / one for one in ours], [1 / one for one in theirs])
        rows.append(
            {
                "batch": batch,
                "tokens each": tokens,
                "ms": f"{1e3 * median(ours):.1f}",
                "ms by torch": f"{1e3 * median(theirs):.1f}",
                "ratio": str(ratio),
            }
        )
        goals.append(ratio_goal(f"batch {batch}, {tokens} tokens each", NEVER_SLOWER, ratio))
    name = f"decoding rounds of {model.name}, {dtype}, {torch.get_num_threads()} threads"
    return BenchResult(name, rows, goals)


@contextmanager
def _torch_forms() -> Iterator[None]:
    """Computes products as if no form had been measured."""
    served = dict(products._served)
    products._served.clear()
    try:
        yield
    finally:
        products._served.update(served)


def _round(weights: DecoderWeights, batch: int, tokens: int) -> float:
    """Seconds of one round after CONTEXT cached tokens."""
    config, dtype = weights.config, weights.head.dtype
    cache = StaticCache(
        config,
        layers=config.num_layers,
        slots=batch,
        capacity=CONTEXT + tokens,
        dtype=dtype,
        device=weights.head.device,
    )
    positions = (CONTEXT + torch.arange(tokens)).expand(batch, -1)
    token_ids = torch.arange(batch * tokens).view(batch, tokens)
    began = time.perf_counter()
    block = decoder.make_block(
        config, weights.rotation, cache, slice(0, batch), positions, CONTEXT + tokens
    )
    decoder.head_logits(weights, decoder.forward_hidden(weights, cache, token_ids, block))
    return time.perf_counter() - began
