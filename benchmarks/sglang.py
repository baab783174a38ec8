"""Compares the SGLang engine with the embedded engine: start, tokens/s, acceptance length, and the
cost of capture.

Both engines serve the demo's trained policy and drafter with two workers of one thread. One worker
captures every request's hidden rows; the other starts without capture. All but one worker are idle
at a time. Runs interleave. The two runs of a pair are neighbours in time and have equal prompts and
seeds, hence equal tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from benchmarks.bench_worker import BenchWorker
from benchmarks.demo_runs import demo_folder
from benchmarks.result import BenchResult, Goal, Ratio, Row, paired_ratio, ratio_goal
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

KINDS = ("embedded", "sglang")
CAPTURE_GOAL = 0.95
ARMS = ("off", "eagle:3_1_4", "eagle:5_1_6")
QUESTIONS = ("48:36=", "91:35=", "17:5=", "84:60=", "99:12=", "7:3=", "64:40=", "51:34=")
HIDDEN = 128


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One batch of requests from the first to the last token."""

    seconds: float
    tokens: int
    accept_length: float
    hashes: tuple[tuple[int, ...], ...]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


async def run_batch(
    worker: BenchWorker, prompts: Sequence[Sequence[int]], arm: str, max_tokens: int
) -> BatchRun:
    """Generates for all prompts at once; an empty `arm` lets the bandit choose."""
    requests = [
        pb.EngineRequest(
            prompt_token_ids=prompt,
            sampling=tpb.SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=index),
            capture=worker.captures,
        )
        for index, prompt in enumerate(prompts)
    ]
    began = time.perf_counter()
    ended = await worker.generate(requests, arm)
    seconds = time.perf_counter() - began
    rounds = sum(one.chunk.speculation.drafted_rounds for one in ended)
    drafted = sum(one.chunk.speculation.drafted_round_tokens for one in ended)
    tokens = tuple(tuple(one.chunk.token_ids) for one in ended)
    return BatchRun(seconds, sum(map(len, tokens)), drafted / rounds if rounds else 1.0, tokens)


def settings(kind: str) -> dict[str, Any]:
    """Engine settings: the same model, drafter and limits for both engines."""
    demo = demo_folder()
    return {
        "model_dir": str(demo / "policy_trained"),
        "drafter": str(demo / "drafter_trained"),
        "dtype": "float32",
        "threads": 1,
        "max_batch": 64,
        "max_sequence_tokens": 256,
        "arms": list(ARMS),
        **({"device": "cpu"} if kind == "sglang" else {}),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--pairs", type=int, default=15, help="pairs of runs of each comparison")
    parser.add_argument("--batch", type=int, default=16, help="requests at once")
    parser.add_argument("--max-tokens", type=int, default=96, help="response tokens at most")
    parser.add_argument("--quick", action="store_true", help="3 pairs, batch 8")


async def run(options: argparse.Namespace) -> BenchResult:
    """Starts all workers, measures, and stops them."""
    pairs, batch = (3, 8) if options.quick else (options.pairs, options.batch)
    codec = TextCodec(demo_folder() / "policy_trained")
    prompts = [codec.encode(QUESTIONS[i % len(QUESTIONS)]) for i in range(batch)]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-")))
        context: zmq.Context[Any] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        workers = {
            (kind, width > 0): BenchWorker(kind, folder, settings(kind), row_width=width)
            for kind in KINDS
            for width in (0, 2 * HIDDEN)
        }
        for worker in workers.values():
            stack.push_async_callback(worker.stop)
            await worker.start(context)
        return await _compare(workers, prompts, pairs, options.max_tokens)


async def _compare(
    workers: Mapping[tuple[str, bool], BenchWorker],
    prompts: Sequence[Sequence[int]],
    pairs: int,
    max_tokens: int,
) -> BenchResult:
    ways = {"off": "off", "bandit": ""}
    runs: dict[tuple[str, str, bool], list[BatchRun]] = {}
    for number in range(pairs + 1):  # the first warms up
        for name, arm in ways.items():
            for (kind, captures), worker in workers.items():
                one = await run_batch(worker, prompts, arm, max_tokens)
                if number:
                    runs.setdefault((kind, name, captures), []).append(one)

    rows = [_row(kind, name, workers[kind, True].start_s, runs) for kind in KINDS for name in ways]
    equal = len({one.hashes for several in runs.values() for one in several}) == 1
    goals = [Goal("tokens of both engines, all arms, equal (1: yes)", 1.0, float(equal), equal)]
    for name in ways:
        cost = _ratio(runs["sglang", name, True], runs["sglang", name, False])
        goals.append(
            ratio_goal(f"sglang {name}: tokens/s with capture / without", CAPTURE_GOAL, cost)
        )

    return BenchResult("SGLang beside the embedded engine, one thread each, CPU, fp32", rows, goals)


def _row(
    kind: str, name: str, start_s: float, runs: Mapping[tuple[str, str, bool], list[BatchRun]]
) -> Row:
    plain, captured = runs[kind, name, False], runs[kind, name, True]
    return {
        "engine": kind,
        "arms": name,
        "start s": start_s,
        "tokens/s": statistics.median(one.rate for one in plain),
        "acceptance length": statistics.median(one.accept_length for one in plain),
        "tokens/s with capture": statistics.median(one.rate for one in captured),
        "capture / none": str(_ratio(captured, plain)),
    }


def _ratio(ours: Sequence[BatchRun], theirs: Sequence[BatchRun]) -> Ratio:
    return paired_ratio([one.rate for one in ours], [one.rate for one in theirs])
