"""Measures every profile of both engines on the demo's policy: log-probs, held-out accuracy,
decoding speed and the time of an update.

Speed is tokens per second over the same prompts, all profiles in turns, as a ratio to the same
engine without a profile. That engine uses --dtype if it is embedded, and bfloat16 if it is SGLang.
Retention is the accuracy as a share of that engine's accuracy. Speed times retention is
CloudMatrix's measure of a quantised engine (Zuo et al. 2025, arXiv 2506.12708). A profile is worth
its use if the product is above 1.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import profiles_sglang
from benchmarks.engine.runs import (
    TimedRun,
    Workload,
    decode,
    rate_ratio,
    take_turns,
    workload,
)
from benchmarks.options import above_zero
from benchmarks.profile_accuracy import accuracy
from benchmarks.profile_report import (
    ProfileReport,
    measure_profile,
)
from benchmarks.result import BenchResult, Goal, Ratio, Row, say
from paceline.errors import InvalidInput
from paceline.models.profiles import ROUNDED
from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.services.rollout_gateway.engines.base import Engine
from paceline.services.rollout_gateway.engines.embedded.engine import EmbeddedEngine
from paceline.services.rollout_gateway.engines.embedded.spec import EmbeddedSpec
from paceline.services.rollout_gateway.engines.sglang.host import check_installed
from paceline.services.rollout_gateway.environments import TextTurn
from paceline.tasks import Task
from paceline.tasks.file import TaskFile

SCORED_TOKENS = 64


class BesidePlain(NamedTuple):
    """A profile beside the same engine without a profile."""

    row: Row
    speed: Ratio
    product: float  # of speed and retention

    def goal(self, engine: str) -> Goal:
        """Goal that the profile pays; open if the pairs do not resolve its speed."""
        name = f"{engine}, {self.row['profile']}: speed x retention"
        return Goal(name, 1.0, self.product, self.product >= 1 if self.speed.resolved else None)


@dataclass(frozen=True, slots=True)
class HeldOutWork:
    """Model, tasks and workload of all engines."""

    model: Path
    codec: TextCodec
    tasks: Sequence[Task]
    work: Workload

    async def judged(
        self, facts: Row, runs: Sequence[TimedRun], plain: Sequence[TimedRun], max_tokens: int
    ) -> BesidePlain:
        """Makes a row of `facts` and of the runs' figures beside the runs without a profile."""
        right, plain_right = [
            await accuracy(turns(one[0], self.codec, max_tokens), self.tasks)
            for one in (runs, plain)
        ]
        speed = rate_ratio(runs, plain)
        product = speed.value * (right / plain_right if plain_right else 0.0)
        found = {
            "speed": str(speed),
            "accuracy": f"{right:.3f}",
            "speed x retention": f"{product:.3f}",
        }
        return BesidePlain({**facts, **found}, speed, product)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the bench."""
    count = above_zero(int)
    parser.add_argument("--demo", type=Path, default=Path("examples/demo"))
    parser.add_argument("--policy", default="policy_trained", help="folder of the demo")
    parser.add_argument("--prompts", type=count, default=128, help="held-out tasks answered")
    parser.add_argument("--batch", type=count, default=32, help="tasks at once")
    parser.add_argument("--max-tokens", type=count, default=368)
    parser.add_argument("--pairs", type=count, default=3, help="turns of every engine")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--engines", default="embedded,sglang", help="engines, with commas")


async def run(options: argparse.Namespace) -> BenchResult:
    """Makes a row and a goal for each profile of each engine.

    Raises InvalidInput for an unknown engine and for prompts that do not fit. Raises TaskFileError,
    and ConfigError if SGLang is wanted but not installed.
    """
    wanted = options.engines.split(",")
    if unknown := [one for one in wanted if one not in ENGINES]:
        raise InvalidInput("no such engine", seen=unknown[0], allowed=", ".join(ENGINES))
    if "sglang" in wanted:
        check_installed()
    model = Path.cwd() / options.demo / options.policy
    codec = TextCodec(model)
    tasks = TaskFile(str(options.demo / "tasks_heldout.jsonl"))[: options.prompts]
    prompts = [codec.encode(task.prompt) for task in tasks]
    asked = HeldOutWork(model, codec, tasks, workload(prompts, options.batch, options.max_tokens))
    rows: list[Row] = []
    goals: list[Goal] = []
    for name in wanted:
        found = await ENGINES[name](asked, options)
        rows += [{"engine": name, **one.row} for one in found]
        goals += [one.goal(name) for one in found[1:]]  # the first is without a profile
    return BenchResult(
        f"profiles on {options.policy}, {options.prompts} held-out tasks", rows, goals
    )


async def _embedded(asked: HeldOutWork, options: argparse.Namespace) -> list[BesidePlain]:
    prompts = [one.prompt for one in asked.work.requests[: options.batch]]
    reports = {}
    for name in ("", *ROUNDED):
        reports[name] = measure_profile(
            asked.model,
            name,
            prompts,
            tokens=SCORED_TOKENS,
            dtype=options.dtype,
            threads=options.threads,
        )
        say(f"{name or options.dtype}: gap {reports[name].gap_mean:.4f}")
    ways = {
        name: partial(
            decode, _engine(asked.model, name, options), asked.work, "off", options.threads
        )
        for name in reports
    }
    runs = await take_turns(ways, options.pairs, f"batch {options.batch}")
    return [
        await asked.judged(_of_report(report), runs[name], runs[""], options.max_tokens)
        for name, report in reports.items()
    ]


async def _sglang(asked: HeldOutWork, options: argparse.Namespace) -> list[BesidePlain]:
    found = await profiles_sglang.measured(asked.model, asked.work, options, SCORED_TOKENS)
    return [
        await asked.judged(
            {
                "profile": name or profiles_sglang.PLAIN,
                "gap": f"{one.gap_mean:.2g}",
                "prepare ms": f"{1e3 * one.prepare_s:.0f}",
                "commit ms": f"{1e3 * one.commit_s:.1f}",
            },
            one.runs,
            found[""].runs,
            options.max_tokens,
        )
        for name, one in found.items()
    ]


ENGINES = {"embedded": _embedded, "sglang": _sglang}


def turns(one: TimedRun, codec: TextCodec, max_tokens: int) -> list[TextTurn]:
    """Decodes the answers of a run to texts."""
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
    return EmbeddedEngine(EmbeddedSpec.model_validate(settings))


def _of_report(report: ProfileReport) -> Row:
    errors = [one.relative for one in report.matrices]
    return {
        "profile": report.profile or report.dtype,
        "error": f"{statistics.fmean(errors):.2%}" if errors else "",
        "gap": f"{report.gap_mean:.2g}",
        "KL": f"{report.divergence:.2g}",
        "MiB": f"{report.bytes / 2**20:.2f}",
        "prepare ms": f"{1e3 * report.prepare_s:.0f}",
        "commit ms": f"{1e3 * report.commit_s:.1f}",
    }
