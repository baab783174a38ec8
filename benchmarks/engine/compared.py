"""Compares the embedded engine with transformers, injected acceptance and bf16, and measures memory
and the time of a round beside the matrix products alone.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.engine import injected as injected
from benchmarks.engine.runs import (
    PROMPT_LOOKUP,
    Decoded,
    Flips,
    TimedRun,
    TransformersModel,
    Way,
    Workload,
    decode,
    flips,
    held_out_prompts,
    rate_ratio,
    take_turns,
    workload,
)
from benchmarks.engine.sections import (
    ARMS,
    OFF,
    Extent,
    Findings,
    chosen,
    equality_goal,
    forced,
    judged,
    speed_rows,
)
from benchmarks.processes import Meter
from benchmarks.result import Goal, Row, say
from paceline.local.memory_plan import embedded_parts
from paceline.messages import from_message
from paceline.models.config import ModelConfig, read_config
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.embedded.drafters import (
    engine_arms,
    engine_kinds,
    slack,
)
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.nouns import RoundSplit

STAGES = tuple(one.name for one in fields(RoundSplit) if one.name.endswith("_s"))
"""Stages of a round, as the engine counts their seconds."""

REPEATS = 15
SQUARE = 1024


GENERATE = "transformers generate"
PLAIN_GOALS = {1: 1.25, 8: 2.0}
ACCEPTANCES, STEPS = (0.6, 0.8, 0.95), (3, 7)
INJECTED_BATCHES, INJECTED_PROMPT, INJECTED_TOKENS = (1, 8), 16, 48
FLIP_SEQUENCES, FLIP_BATCH = 256, 32
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
MIB = 2**20


async def beside_transformers(plan: Extent) -> Findings:
    """Compares greedy decoding, so that both sides have the same tokens to generate."""
    engine, bandits = plan.engine("policy_trained"), plan.bandit_engines("policy_trained")
    model = TransformersModel(plan.demo / "policy_trained")
    assistant = TransformersModel(plan.demo / "policy_start").model
    rows: list[Row] = []
    goals: list[Goal] = []
    for batch in plan.batches_of((1, 8)):
        work = plan.work(batch, greedy=True, waves=4 if batch == 1 else 1)
        hows: dict[str, dict[str, object]] = {GENERATE: {}}
        if batch == 1:  # transformers speculates for one sequence at a time
            hows |= {"transformers prompt lookup": dict(PROMPT_LOOKUP)}
            hows |= {"transformers assisted by policy_start": {"assistant_model": assistant}}
        ways: dict[str, Way] = {
            name: partial(model.generate, work, plan.threads, how) for name, how in hows.items()
        }
        ways |= forced(engine, work, plan.threads, (OFF,)) | chosen(bandits, work, plan.threads)
        runs = await take_turns(ways, plan.pairs, f"transformers, batch {batch}")
        rows += speed_rows("beside transformers, greedy, fp32", batch, runs, GENERATE)
        if batch in PLAIN_GOALS:
            ratio = rate_ratio(runs[OFF], runs[GENERATE])
            goals.append(
                judged(f"batch {batch}: off / transformers generate", PLAIN_GOALS[batch], ratio)
            )

    return Findings(rows, [*goals, equality_goal("beside transformers", rows)])


async def injected_acceptance(plan: Extent) -> Findings:
    """Measures a model with random weights and drafts that are right with a chosen probability and
    cost nothing.
    """
    arms = {steps: f"{injected.NAME}:{steps}_1_{steps + 1}" for steps in STEPS}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        sizes = injected.RANDOM_TINY if plan.quick else injected.RANDOM_56M
        count = injected.write_random_model(Path(folder), sizes, seed=0)
        spec = plan.spec(
            folder, drafter="ngram", max_batch=max(INJECTED_BATCHES), arms=tuple(arms.values())
        )
        engine, known = injected.build_injected(spec)

    rows: list[Row] = []
    for batch in plan.batches_of(INJECTED_BATCHES):
        work = random_prompts(batch, sizes["vocab_size"])
        answers = decode(engine, work, OFF, plan.threads).answers
        right = {
            request.prompt: answer.tokens
            for request, answer in zip(work.requests, answers, strict=True)
        }
        ways = forced(engine, work, plan.threads, (OFF,))
        expected: dict[str, float | None] = {OFF: None}
        for acceptance in ACCEPTANCES:
            for steps, arm in arms.items():
                name = f"right with {acceptance}, {steps} drafts"
                ways[name] = partial(
                    _injected_run, engine, known, right, acceptance, work, arm, plan.threads
                )
                expected[name] = injected.expected_accept_length(acceptance, steps)
        runs = await take_turns(ways, plan.few, f"random weights, batch {batch}")
        section = f"{count / 1e6:.1f}M random weights, injected acceptance, fp32"
        rows += [
            {**row, "expected": expected[str(row["way"])]}
            for row in speed_rows(section, batch, runs)
        ]

    return Findings(rows, [equality_goal("injected acceptance", rows)])


def random_prompts(count: int, vocab_size: int) -> Workload:
    """Makes requests with different prompts of one length and answers of one length, all at
    once.
    """
    draws = np.random.default_rng(count).integers(2, vocab_size, (count, INJECTED_PROMPT)).tolist()
    return workload([tuple(prompt) for prompt in draws], count, INJECTED_TOKENS, ignore_eos=True)


def _injected_run(
    engine: Engine,
    known: injected.KnownTokens,
    right: Mapping[tuple[int, ...], tuple[int, ...]],
    acceptance: float,
    work: Workload,
    arm: str,
    threads: int,
) -> TimedRun:
    known.know(right, acceptance, seed=1)
    return decode(engine, work, arm, threads)


async def in_bf16(plan: Extent) -> Findings:
    """Compares bf16 with fp32: speed, and how often equal seeds give other tokens."""
    rows: list[Row] = []
    flipping: list[Row] = []
    goals: list[Goal] = []
    for dtype in ITEM_BYTES:
        engine = plan.engine(
            "policy_trained", dtype=dtype, max_batch=max(FLIP_BATCH, *plan.batches)
        )
        best = await _fastest_arm(engine, plan)
        if dtype == "bfloat16":
            for batch in plan.batches_of((1, 8)):
                ways = forced(engine, plan.work(batch), plan.threads, (OFF, best))
                runs = await take_turns(ways, plan.few, f"bf16, batch {batch}")
                rows += speed_rows("policy_trained, bf16", batch, runs)
        found = _flips_of(engine, best, plan)
        flipping += [_flip_row(dtype, name, one) for name, one in found.items()]
        say(
            f"{dtype}: "
            + ", ".join(
                f"{name}: {one.flipped} of {one.sequences} flipped" for name, one in found.items()
            )
        )
        if dtype == "float32":
            wrong = sum(one.unexplained for one in found.values())
            share = 1 - wrong / sum(one.sequences for one in found.values())
            name = "fp32: equal tokens between arms and batch sizes (near-ties left out)"
            goals.append(Goal(name, 1.0, share, wrong == 0))

    return Findings(rows + flipping, goals)


async def _fastest_arm(engine: Engine, plan: Extent) -> str:
    """The fastest arm, by the summed rates of a few runs at the middle batch size."""
    work = plan.work(plan.batches[len(plan.batches) // 2])
    runs = await take_turns(
        forced(engine, work, plan.threads, ARMS), 1 if plan.quick else 2, "which arm is best"
    )
    return max(runs, key=lambda arm: sum(one.rate for one in runs[arm]))


def _flips_of(engine: Engine, best: str, plan: Extent) -> dict[str, Flips]:
    """Flips between off and an arm on many sequences; for off, also between batches of 1 and 8 on a
    quarter of the sequences.
    """
    prompts = held_out_prompts(plan.demo, 8 if plan.quick else FLIP_SEQUENCES)
    few = prompts[: max(8, len(prompts) // 4)]

    def answers(some: list[tuple[int, ...]], batch: int, arm: str) -> tuple[Decoded, ...]:
        return decode(engine, workload(some, batch, plan.max_tokens), arm, plan.threads).answers

    return {
        f"off and {best}": flips(
            answers(prompts, FLIP_BATCH, OFF), answers(prompts, FLIP_BATCH, best)
        ),
        "off, batch 1 and 8": flips(answers(few, 1, OFF), answers(few, 8, OFF)),
    }


def _flip_row(dtype: str, name: str, found: Flips) -> Row:
    return {
        "section": "same seeds, other tokens",
        "dtype": dtype,
        "between": name,
        "sequences": found.sequences,
        "flipped": found.flipped,
        "near-ties": found.near_ties,
        "share of sequences": found.flipped / found.sequences,
        "tokens": found.tokens,
        "share of tokens from the first difference on": found.behind / found.tokens,
    }


async def memory(plan: Extent) -> Findings:
    """Measures the peak resident memory of this process, before other sections load anything,
    beside the computed sizes of the caches.
    """
    several = 4 if plan.quick else 64
    spec = plan.spec("policy_trained", max_batch=several)
    meter = Meter(os.getpid())
    peaks = {"before the engine": meter.read().peak_rss_mib}
    engine = plan.engine("policy_trained", max_batch=several)
    peaks["engine loaded"] = meter.read().peak_rss_mib
    work = plan.at_once(several)
    for arm in (OFF, ARMS[0], ""):
        decode(engine, work, arm, plan.threads)
        peaks[f"after {several} requests at once, {arm or 'bandit'}"] = meter.read().peak_rss_mib
    rows: list[Row] = [
        {"section": "memory", "when": when, "peak MiB": round(peak, 1)}
        for when, peak in peaks.items()
    ]
    parts = cache_mib(read_config(plan.demo / "policy_trained"), spec)
    rows += [
        {"section": "memory", "when": f"of it {name}, computed", "peak MiB": mib}
        for name, mib in parts.items()
    ]
    say(f"memory: {peaks['engine loaded']:.0f} MiB loaded")
    return Findings(rows, [])


def cache_mib(config: ModelConfig, spec: EmbeddedSpec) -> dict[str, float]:
    """MiB of the tensors that an engine allocates at once; pages that no sequence reaches are never
    resident.
    """
    arms = engine_arms(spec, engine_kinds(spec)).values()
    cells = (spec.max_batch + spec.prefix_slots) * (spec.max_sequence_tokens + slack(arms))
    parts = embedded_parts(config, cells, ITEM_BYTES[spec.dtype], states=1, drafter=True)
    return {name: size / MIB for name, size in parts.items()}


async def profile(plan: Extent) -> Findings:
    """Measures the milliseconds of a round by stage, beside the time of its matrix products
    alone.
    """
    engine = plan.engine("policy_trained")
    best = await _fastest_arm(engine, plan)
    config = read_config(plan.demo / "policy_trained")
    rows: list[Row] = []
    for batch in plan.batches_of((1, 8, 32)):
        work = plan.work(batch)
        for arm in (OFF, best):
            decode(engine, work, arm, plan.threads)
            before = from_message(RoundSplit, engine.load.split)
            run = decode(engine, work, arm, plan.threads)
            spent = from_message(RoundSplit, engine.load.split) - before
            rows.append(_profile_row(batch, arm, run, spent, config))

    say(
        "profile: "
        + ", ".join(f"{row['way']} at {row['batch']}: {row['ms']:.2f} ms" for row in rows)
    )
    gflops, flops = matmul_gflops(), flops_per_token(config)
    limit: Row = {
        "section": "arithmetic limit, fp32",
        "operations a token": flops,
        "10^9 operations/s of a 1024^3 product": gflops,
        "tokens/s if that were all": gflops * 1e9 / flops,
    }
    return Findings([*rows, limit], [])


def _profile_row(
    batch: int, arm: str, run: TimedRun, spent: RoundSplit, config: ModelConfig
) -> Row:
    per_round = 1e3 / run.rounds
    nodes = spent.nodes / spent.rounds
    seconds = {stage.removesuffix("_s"): getattr(spent, stage) for stage in STAGES}
    return {
        "section": "ms of a round, fp32",
        "batch": batch,
        "way": arm,
        "nodes": nodes,
        "tokens": run.tokens / run.rounds,
        "ms": run.seconds * per_round,
        **{stage: spent_s * per_round for stage, spent_s in seconds.items()},
        "rest": (run.seconds - sum(seconds.values())) * per_round,
        "products alone": linear_seconds(config, round(nodes)) * 1e3,
    }


def matmul_gflops(dtype: torch.dtype = torch.float32) -> float:
    """10^9 floating-point operations per second of a 1024 x 1024 x 1024 product with torch's
    threads.
    """
    a, b = torch.randn(SQUARE, SQUARE).to(dtype), torch.randn(SQUARE, SQUARE).to(dtype)
    return 2 * SQUARE**3 / _median_seconds(lambda: a @ b) / 1e9


def linear_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """[out, in] of every matrix a token passes, as the engine fuses them; the embedding is a
    lookup.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    layer = [
        (queries + config.kv_width, hidden),
        (hidden, queries),
        (2 * inner, hidden),
        (hidden, inner),
    ]
    return layer * config.num_layers + [(config.vocab_size, hidden)]


def flops_per_token(config: ModelConfig) -> int:
    """Two operations per weight of linear_shapes; attention itself is left out."""
    return 2 * sum(out * width for out, width in linear_shapes(config))


def linear_seconds(config: ModelConfig, rows: int) -> float:
    """Seconds of the model's matrix products alone on `rows` tokens, fp32, each matrix at its own
    place in memory.
    """
    pairs = [
        (torch.randn(rows, width), torch.randn(out, width)) for out, width in linear_shapes(config)
    ]

    def products() -> Tensor:
        for x, weight in pairs:
            out = functional.linear(x, weight)
        return out

    return _median_seconds(products)


@torch.inference_mode()
def _median_seconds(work: Callable[[], Tensor]) -> float:
    seconds = []
    for number in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        if number:  # the first warms up
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
