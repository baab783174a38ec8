"""Measures a drafter's use of its slot: positions trained per second, beside the matrix products of
the same steps alone, and the share of the gate.

The bench uses one core, the demo's drafter and settings, and rows as long as the demo's answers. A
wider drafter begins with random weights; it shows the effect of larger matrices.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from benchmarks.demo_runs import demo_folder
from benchmarks.options import above_zero
from benchmarks.packing import DEMO, LONGEST, draw_samples
from benchmarks.result import BenchResult, Row, at_most, paired_ratio, ratio_goal, say
from paceline.config.load import load_config
from paceline.errors import InvalidInput
from paceline.models.config import ModelConfig
from paceline.models.products import spare_rows
from paceline.services.drafter_trainer.config import DrafterTrainerConfig
from paceline.services.drafter_trainer.gate.evaluate import GateJob, Pace
from paceline.services.drafter_trainer.learn.learner import DrafterLearner, initial_net
from paceline.services.drafter_trainer.learn.membership import on_cpu
from paceline.services.drafter_trainer.rows.sample import FeatureSample, PolicyHead, pack
from paceline.speculators.packed import PackedRow

CEILING_SHARE, GATE_SHARE = 0.6, 0.2
WARM_UP = 2
NEVER = 1 << 30
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_linear_pointwise"}
"""Names of torch's operators that multiply matrices."""
HASH = "0" * 16  # head hash of the rows of draw_samples


@dataclass(frozen=True, slots=True)
class Timed:
    """Measurements by row."""

    steps: list[float]  # seconds
    alone: list[float]  # seconds of the products alone
    positions: list[int]
    products: list[int]


class Products(TorchDispatchMode):
    """Records every product of matrices, so that it can be repeated with other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in PRODUCTS:
            again, with_words = tree_map(_other_numbers, (args, kwargs))
            self._calls.append(lambda: func(*again, **with_words))
        return func(*args, **kwargs)

    def repeat(self) -> None:
        """Repeats all products in their order."""
        for call in self._calls:
            call()

    def __len__(self) -> int:
        return len(self._calls)


def _other_numbers(value: Any) -> Any:
    return torch.empty_like(value).normal_() if isinstance(value, Tensor) else value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--pairs", type=above_zero(int), default=60, help="steps of either side")
    parser.add_argument("--tokens", type=above_zero(int), default=256, help="of a micro-batch")
    parser.add_argument(
        "--hidden",
        type=above_zero(int),
        default=DEMO.hidden_size,
        help=f"numbers of a hidden state, a multiple of {DEMO.head_dim}",
    )


async def run(options: argparse.Namespace) -> BenchResult:
    """Times steps and their products in turns, then rounds of the gate.

    Raises InvalidInput for a width that is no multiple of the head size.
    """
    shape = widened(options.hidden)
    torch.set_num_threads(1)
    store = dist.HashStore()  # type: ignore[attr-defined]  # exported where gloo is built in
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return _measured(shape, options.pairs, options.tokens)
    finally:
        dist.destroy_process_group()


def widened(hidden: int) -> ModelConfig:
    """The demo's policy with wider layers: more heads of the same size, an MLP in proportion."""
    if hidden % DEMO.head_dim:
        raise InvalidInput("width", seen=hidden, allowed=f"a multiple of {DEMO.head_dim}")
    heads = hidden // DEMO.head_dim
    return replace(
        DEMO,
        hidden_size=hidden,
        intermediate_size=hidden * DEMO.intermediate_size // DEMO.hidden_size,
        num_heads=heads,
        num_kv_heads=heads // 2 if heads % 2 == 0 else heads,
    )


def _measured(shape: ModelConfig, pairs: int, tokens: int) -> BenchResult:
    folder = demo_folder()
    drafter = "eagle" if shape != DEMO else f'"{folder / "drafter_start"}"'
    config = load_config(
        DrafterTrainerConfig,
        "drafter_trainer",
        [folder / "demo.toml"],
        [f"drafter_trainer.drafter={drafter}"],
    )
    learner = _learner(config, shape, config.micro_batches_per_step)
    unstepped = _learner(config, shape, NEVER)
    rows = [_row(shape, tokens, seed) for seed in range(pairs + WARM_UP)]
    head = _head(shape)
    timed = _in_turn(learner, unstepped, rows, head)
    positions = round(statistics.median(timed.positions))
    products = round(statistics.median(timed.products))
    say(f"{pairs} steps of {positions} positions, {products} products each")
    gate_s = _gate_round(config, shape, learner, head)
    interval_s = config.gate.interval_steps * statistics.median(timed.steps)
    share = gate_s / (gate_s + interval_s)
    table: list[Row] = [
        _told("micro-steps", positions, timed.steps),
        _told("their products alone", positions, timed.alone),
        {"of the slot": "a round of the gate", "ms": round(gate_s * 1e3, 2)},
    ]
    goals = [
        ratio_goal(
            "of what the products alone would allow",
            CEILING_SHARE,
            paired_ratio(timed.alone, timed.steps),
        ),
        at_most(f"share of the gate, every {config.gate.interval_steps} steps", GATE_SHARE, share),
    ]
    return BenchResult(f"a slot of the drafter, one core, width {shape.hidden_size}", table, goals)


def _learner(
    config: DrafterTrainerConfig, shape: ModelConfig, micro_batches: int
) -> DrafterLearner:
    net = initial_net(config, shape)
    return DrafterLearner(net, config.optimizer, micro_batches=micro_batches, members=on_cpu(1))


def _head(shape: ModelConfig) -> PolicyHead:
    generator = torch.Generator().manual_seed(0)
    embed, head = torch.randn(2, shape.vocab_size, shape.hidden_size, generator=generator)
    return PolicyHead(HASH, 0, embed, head)


def _row(shape: ModelConfig, tokens: int, seed: int) -> PackedRow:
    """Packs the samples that fit, at least one, as the store does."""
    chosen, room = list[FeatureSample](), tokens
    for one in draw_samples(tokens, seed, shape.hidden_size):
        room -= one.positions
        if chosen and room < 0:
            break
        chosen.append(one)
    row = pack(chosen, window=LONGEST)
    return row.padded(spare) if (spare := spare_rows(row.states)) else row


def _in_turn(
    learner: DrafterLearner,
    unstepped: DrafterLearner,
    rows: Sequence[PackedRow],
    head: PolicyHead,
) -> Timed:
    """Times each row's step and its products, without products of the optimiser.

    The side that begins alternates, and two pairs warm up.
    """
    timed = Timed([], [], [], [])
    for number, row in enumerate(rows):
        with (made := Products()):
            unstepped.micro_step(row, head)
        made.repeat()

        sides: list[tuple[list[float], Callable[[], object]]] = [
            (timed.steps, partial(learner.micro_step, row, head)),
            (timed.alone, made.repeat),
        ]
        for seconds, side in sides if number % 2 else reversed(sides):
            began = time.perf_counter()
            side()
            seconds.append(time.perf_counter() - began)
        timed.positions.append(int(row.valid.sum()))
        timed.products.append(len(made))
    return Timed(*(values[WARM_UP:] for values in astuple(timed)))


def _gate_round(
    config: DrafterTrainerConfig, shape: ModelConfig, learner: DrafterLearner, head: PolicyHead
) -> float:
    """Seconds to measure a candidate and the serving drafter on as many samples as a round of the
    gate has.
    """
    nets = [learner.snapshot(), learner.snapshot()]
    samples = draw_samples(config.gate.samples, 1, shape.hidden_size)
    job = GateJob(nets, samples, {HASH: head}, config.gate, config.buffer.window, Pace())
    began = time.perf_counter()
    while not job.done:
        job.advance()
    return time.perf_counter() - began


def _told(name: str, positions: int, seconds: Sequence[float]) -> Row:
    median = statistics.median(seconds)
    return {
        "of the slot": name,
        "ms": round(median * 1e3, 2),
        "positions/s": round(positions / median),
    }
