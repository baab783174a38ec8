"""Measures the engines as serving systems, with the measures of CloudMatrix384 (arXiv 2506.12708).

The measures are time to first token and time per output token under levels of 50 and 15 ms. Further
measures are prefill and decode tokens per second per TFLOPS, and the cost of a cached prompt's keys
and values.

One worker process of each engine serves the same requests. Prefill is timed separately, with
prompts that differ from their first token on and get one-token answers. Decoding is timed from the
moment when all requests of a batch have their first token. A level's result is the fastest batch
size that keeps its mean time per output token within the level.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from benchmarks.bench_worker import BenchWorker
from benchmarks.demo_runs import demo_folder
from benchmarks.engine.runs import held_out_prompts
from benchmarks.options import above_zero, counts
from benchmarks.result import BenchResult, Goal, say
from benchmarks.serving_tables import EngineFound, Reused, Served, rate_of, served_of, table_rows
from paceline.arm_names import OFF
from paceline.errors import InvalidInput
from paceline.models.config import read_config
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

ENGINES = ("embedded", "sglang")
ARMS = {OFF: OFF, "bandit": ""}
REUSED = (0.0, 0.5, 0.9)
"""Shares of a prompt that are already cached."""
_FIRST_TOKEN_ID = 8  # lower ids are tokens with special meanings


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """Model, drafter and sizes of the measurement."""

    model: Path
    drafter: str
    batches: tuple[int, ...]
    prompt_tokens: int
    response_tokens: int
    repeats: int
    threads: int
    tflops: float  # 0: the workers' own measurement

    def engine(self, kind: str) -> dict[str, Any]:
        """Settings of an engine: the same model, drafter and limits for every engine."""
        return {
            "model_dir": str(self.model),
            "drafter": self.drafter,
            "dtype": "float32",
            "threads": self.threads,
            "max_batch": max(self.batches),
            "max_sequence_tokens": self.prompt_tokens + self.response_tokens + 16,
            **({"device": "cpu"} if kind == "sglang" else {}),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    option = parser.add_argument
    option("--engine", default=",".join(ENGINES), help=f"of {', '.join(ENGINES)}, with commas")
    option("--model", type=Path, help="a model's directory; else the demo's trained policy")
    option("--drafter", default="", help="its drafter; else the demo's, or off with --model")
    option("--batches", type=counts, default=(1, 2, 4, 8, 16, 32), help="requests at once")
    option("--prompt-tokens", type=above_zero(int), default=256, help="of prompts to prefill")
    option("--response-tokens", type=above_zero(int), default=64, help="of a response at most")
    option("--repeats", type=above_zero(int), default=5, help="runs of each; medians count")
    option("--threads", type=above_zero(int), default=1, help="threads of a worker")
    option("--tflops", type=above_zero(float), help="peak of the device; else as it is measured")
    option("--quick", action="store_true", help="one run, batches of 1 and 2: shows the form")


async def run(options: argparse.Namespace) -> BenchResult:
    """Measures one engine after the other.

    Raises InvalidInput for options out of range, NotFound outside a clone.
    """
    plan, kinds = plan_of(options), engines_of(options.engine)
    found: dict[str, EngineFound] = {}
    for kind in kinds:
        async with AsyncExitStack() as stack:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-"))
            context: zmq.Context[Any] = zmq.Context()
            stack.callback(context.destroy, linger=0)
            worker = BenchWorker(kind, Path(name), plan.engine(kind))
            stack.push_async_callback(worker.stop)
            await worker.start(context)
            found[kind] = await _measure(worker, kind, plan)
    tflops = plan.tflops or max(one.tflops for one in found.values())
    equal = len({tokens for one in found.values() for tokens in one.answers()}) == 1
    goals = [Goal("tokens of all engines and arms equal (1: yes)", 1.0, float(equal), equal)]
    several = len(kinds) > 1 or plan.drafter != OFF
    words = f"serving {plan.model.name}, fp32, threads: {plan.threads}, medians of {plan.repeats}"
    return BenchResult(words, table_rows(found, tflops), goals if several else [])


def engines_of(text: str) -> list[str]:
    """Engines of a comma-separated list. Raises InvalidInput for an unknown engine."""
    named = text.split(",")
    if not set(named) <= set(ENGINES):
        raise InvalidInput("no such engine", seen=text, allowed=", ".join(ENGINES))
    return [kind for kind in ENGINES if kind in named]


def plan_of(options: argparse.Namespace) -> ServingPlan:
    """Makes the plan of the options. Raises InvalidInput for more tokens than the model takes."""
    demo = demo_folder()
    model = options.model or demo / "policy_trained"
    drafter = options.drafter or (OFF if options.model else str(demo / "drafter_trained"))
    longest = read_config(model).max_position_embeddings
    asked = options.prompt_tokens + options.response_tokens + 16
    if asked > longest:
        raise InvalidInput("the model takes fewer tokens", seen=asked, allowed=f"<= {longest}")
    return ServingPlan(
        model,
        drafter,
        (1, 2) if options.quick else options.batches,
        options.prompt_tokens,
        options.response_tokens,
        1 if options.quick else options.repeats,
        options.threads,
        options.tflops or 0.0,
    )


async def _measure(worker: BenchWorker, kind: str, plan: ServingPlan) -> EngineFound:
    vocabulary = read_config(plan.model).vocab_size
    prefill = await _prefill_rate(worker, plan, vocabulary)
    arms = ARMS if plan.drafter != OFF else {OFF: OFF}
    served: dict[str, dict[int, list[Served]]] = {
        name: {batch: [] for batch in plan.batches} for name in arms
    }
    # Repeats are the outer loop, so that other load on the machine affects all sizes alike. The
    # first repeat warms up.
    for number in range(plan.repeats + 1):
        for name, arm in arms.items():
            for batch in plan.batches:
                one = await _decode(worker, plan, batch, arm)
                if number:
                    served[name][batch].append(one)
    for name, found in served.items():
        rates = ", ".join(f"{batch}: {rate_of(runs):,.0f}" for batch, runs in found.items())
        say(f"{kind} {name}, decode tokens/s by requests at once: {rates}")
    reused = {
        share: [await _reuse(worker, plan, vocabulary, share, n) for n in range(plan.repeats)]
        for share in REUSED
    }
    return EngineFound(worker.tflops, prefill, served, reused)


def random_prompt(tokens: int, vocabulary: int, seed: int) -> list[int]:
    """Random ids of ordinary tokens, the same for the same seed."""
    drawn = np.random.default_rng(seed).integers(_FIRST_TOKEN_ID, vocabulary, tokens)
    return [int(token) for token in drawn]


def _request(prompt: Sequence[int], tokens: int, seed: int = 0) -> pb.EngineRequest:
    sampling = tpb.SamplingParams(temperature=1.0, max_tokens=tokens, seed=seed)
    return pb.EngineRequest(prompt_token_ids=prompt, sampling=sampling)


async def _prefill_rate(worker: BenchWorker, plan: ServingPlan, vocabulary: int) -> float:
    """Prompt tokens per second with the largest batch; each answer has one token."""
    count, rates = max(plan.batches), []
    for number in range(plan.repeats + 1):  # the first warms up
        await worker.forget()
        prompts = [
            random_prompt(plan.prompt_tokens, vocabulary, number * count + i) for i in range(count)
        ]
        ended = await worker.generate([_request(one, 1) for one in prompts], OFF)
        rates.append(count * plan.prompt_tokens / max(one.after_s for one in ended))
    return statistics.median(rates[1:])


async def _decode(worker: BenchWorker, plan: ServingPlan, batch: int, arm: str) -> Served:
    """Decodes the demo's held-out prompts, as many as the batch holds."""
    await worker.forget()
    prompts = held_out_prompts(demo_folder(), batch)
    requests = [_request(one, plan.response_tokens, i) for i, one in enumerate(prompts)]
    return served_of(await worker.generate(requests, arm))


async def _reuse(
    worker: BenchWorker, plan: ServingPlan, vocabulary: int, share: float, number: int
) -> Reused:
    """Answers a prompt that shares its beginning with a cached prompt."""
    known = int(plan.prompt_tokens * share)
    begin = random_prompt(known, vocabulary, 2 * number)
    rest = plan.prompt_tokens - known
    one, two = (begin + random_prompt(rest, vocabulary, 1000 + 2 * number + i) for i in (0, 1))
    await worker.forget()
    await worker.generate([_request(one, 1)], OFF)
    before = await worker.prefixes()
    (ended,) = await worker.generate([_request(two, 1)], OFF)
    after = await worker.prefixes()
    return Reused(
        ended.chunk.time_to_first_token_s,
        ended.chunk.cached_prompt_tokens,
        after.lookup_s - before.lookup_s,
        after.copy_s - before.copy_s,
    )
