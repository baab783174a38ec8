"""Measures SGLang's profiles on the demo's policy beside SGLang in bfloat16, with a process for
each profile.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zmq

from benchmarks.bench_worker import BenchWorker
from benchmarks.engine.runs import Decoded, TimedRun, Workload
from benchmarks.profile_report import logprobs
from benchmarks.result import say
from paceline.models.config import read_config
from paceline.models.in_place import ServedModel
from paceline.services.rollout_gateway.engines.sglang.spec import QUANTIZATION
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.v1 import engine_pb2 as pb

PLAIN = "bfloat16"
"""Data type of SGLang without a profile: SGLang multiplies int8 in bfloat16 only."""
_UPDATES = 3
Told = Sequence[tuple[Sequence[int], Sequence[float]]]
"""Tokens of each answer and their log-probs, nats."""


@dataclass(frozen=True, slots=True)
class ServedProfile:
    """Measurements of one profile of SGLang."""

    runs: tuple[TimedRun, ...]
    gap_mean: float  # nats, between the engine's log-probs and float32
    prepare_s: float  # the fastest of three
    commit_s: float


async def measured(
    model: Path, work: Workload, options: argparse.Namespace, scored: int
) -> dict[str, ServedProfile]:
    """Returns measurements by profile; "" is SGLang without a profile.

    The profiles take turns in `options.pairs` runs of the workload, after a run that warms up. The
    gap covers the first `scored` tokens of each answer of a batch.

    Raises ConfigError if SGLang is not installed, and any error of a worker.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-")))
        context: zmq.Context[Any] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        workers: dict[str, BenchWorker] = {}
        for profile in ("", *QUANTIZATION):
            workers[profile] = BenchWorker("sglang", folder, _settings(model, profile, options))
            stack.push_async_callback(workers[profile].stop)
            await workers[profile].start(context)
        runs: dict[str, list[TimedRun]] = {profile: [] for profile in workers}
        told: dict[str, Told] = {}
        for number in range(options.pairs + 1):  # the first warms up
            for profile, worker in workers.items():
                one, told[profile] = await _answered(worker, work)
                if number:
                    runs[profile].append(one)
                    say(f"sglang, {profile or PLAIN}: {one.rate:.0f} tokens/s")
        updates = {profile: await _updated(one, model, profile) for profile, one in workers.items()}
    gaps = _gaps(model, work, told, scored)
    return {one: ServedProfile(tuple(runs[one]), gaps[one], *updates[one]) for one in workers}


def _settings(model: Path, profile: str, options: argparse.Namespace) -> dict[str, object]:
    return {
        "model_dir": str(model.absolute()),
        "profile": profile,
        "dtype": PLAIN,
        "device": "cpu",
        "threads": options.threads,
        "drafter": "off",
        "max_batch": options.batch,
        "max_sequence_tokens": 512,
    }


async def _answered(worker: BenchWorker, work: Workload) -> tuple[TimedRun, Told]:
    """Runs the workload once, wave by wave."""
    ended: list[pb.TokenChunk] = []
    await worker.forget()
    began = time.perf_counter()
    for wave in work.waves:
        requests = [wire.request_to(request) for request in wave]
        ended += [one.chunk for one in await worker.generate(requests, "off")]
    seconds = time.perf_counter() - began
    answers = tuple(Decoded(tuple(one.token_ids)) for one in ended)
    return TimedRun(seconds, answers), [(one.token_ids, one.behavior_logprobs) for one in ended]


async def _updated(worker: BenchWorker, model: Path, profile: str) -> tuple[float, float]:
    times = [await worker.update(number, model, profile) for number in range(1, _UPDATES + 1)]
    prepares, commits = zip(*times, strict=True)
    return min(prepares), min(commits)


def _gaps(model: Path, work: Workload, told: Mapping[str, Told], scored: int) -> dict[str, float]:
    """Mean gap of each profile over the answers of the first wave."""
    config = read_config(model)
    exact = ServedModel(config, torch.float32, config.max_position_embeddings).load(model)
    found: dict[str, float] = {}
    with torch.inference_mode():
        for profile, answers in told.items():
            gaps = []
            for request, (all_tokens, values) in zip(work.waves[0], answers, strict=False):
                tokens = list(all_tokens[:scored])
                ids = torch.tensor([[*request.prompt, *tokens]])
                wanted = logprobs(exact, ids, len(request.prompt))
                own = wanted.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                gaps.append((torch.tensor(values[:scored]) - own).abs())
            found[profile] = float(torch.cat(gaps).mean())
    return found
