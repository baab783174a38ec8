"""Every profile of the embedded engine on the demo's policy: what it costs in log-probs and
held-out accuracy, what it gains in decoding, what an update takes.

Speed is tokens per second over the same prompts, all engines in turns, as a ratio to the engine
without a profile. Retention is accuracy over that engine's, and their product CloudMatrix's measure
of a quantised engine (Zuo et al. 2025, arXiv 2506.12708): above 1 a profile pays.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.engine.runs import TimedRun, decode, rate_ratio, take_turns, workload
from benchmarks.options import above_zero
from benchmarks.result import BenchResult, Row, say
from paceline.models.profiles import ROUNDED
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.embedded.build import build_embedded
from paceline.services.rollout_gateway.engines.embedded.profile_report import (
    ProfileReport,
    measure_profile,
)
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.environments.base import TextTurn
from paceline.services.rollout_gateway.profile_accuracy import accuracy
from paceline.tasks import open_tasks

SCORED_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the bench."""
    count = above_zero(int)
    parser.add_argument("--demo", type=Path, default=Path("examples/demo"))
    parser.add_argument("--policy", default="policy_trained", help="folder of the demo")
    parser.add_argument("--prompts", type=count, default=128, help="held-out tasks answered")
    parser.add_argument("--batch", type=count, default=32, help="of them at once")
    parser.add_argument("--max-tokens", type=count, default=368)
    parser.add_argument("--pairs", type=count, default=3, help="turns of every engine")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=count, default=1)


async def run(options: argparse.Namespace) -> BenchResult:
    """A row for each profile. Raises InvalidInput for prompts that do not fit, TaskFileError."""
    model: Path = options.demo / options.policy
    codec = TextCodec(model)
    tasks = open_tasks(str(options.demo / "tasks_heldout.jsonl"))[: options.prompts]
    prompts = [codec.encode(task.prompt) for task in tasks]
    reports = {}
    for name in ("", *ROUNDED):
        reports[name] = measure_profile(
            model,
            name,
            prompts[: options.batch],
            tokens=SCORED_TOKENS,
            dtype=options.dtype,
            threads=options.threads,
        )
        say(f"{name or options.dtype}: gap {reports[name].gap_mean:.4f}")
    work = workload(prompts, options.batch, options.max_tokens)
    ways = {
        name: partial(decode, _engine(model, name, options), work, "off", options.threads)
        for name in reports
    }
    runs = await take_turns(ways, options.pairs, f"batch {options.batch}")
    right = {
        name: await accuracy(turns(several[0], codec, options.max_tokens), tasks)
        for name, several in runs.items()
    }
    rows = [_row(reports[name], runs[name], runs[""], right[name], right[""]) for name in reports]
    title = f"profiles on {options.policy}, {options.dtype}, {options.prompts} held-out tasks"
    return BenchResult(title, rows, [])


def turns(one: TimedRun, codec: TextCodec, max_tokens: int) -> list[TextTurn]:
    """The answers of a run as texts."""
    return [
        TextTurn(
            answer.tokens,
            codec.decode(answer.tokens),
            "stop" if len(answer.tokens) < max_tokens else "length",
        )
        for answer in one.answers
    ]


def _engine(model: Path, profile: str, options: argparse.Namespace) -> Engine:
    settings = {
        "model_dir": str(model),
        "profile": profile,
        "dtype": options.dtype,
        "threads": options.threads,
        "drafter": "off",
        "max_batch": options.batch,
        "max_sequence_tokens": 512,
    }
    return build_embedded(EmbeddedSpec.model_validate(settings))


def _row(
    report: ProfileReport,
    runs: Sequence[TimedRun],
    plain: Sequence[TimedRun],
    right: float,
    plain_right: float,
) -> Row:
    speed = rate_ratio(runs, plain)
    retention = right / plain_right if plain_right else 0.0
    errors = [one.relative for one in report.matrices]
    return {
        "profile": report.profile or report.dtype,
        "error": f"{statistics.fmean(errors):.2%}" if errors else "",
        "gap": f"{report.gap_mean:.2g}",
        "KL": f"{report.divergence:.2g}",
        "MiB": f"{report.bytes / 2**20:.2f}",
        "speed": str(speed),
        "accuracy": f"{right:.3f}",
        "speed x retention": f"{speed.value * retention:.3f}",
        "prepare ms": f"{1e3 * report.prepare_s:.0f}",
        "commit ms": f"{1e3 * report.commit_s:.1f}",
    }
