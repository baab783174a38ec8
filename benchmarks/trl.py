"""RL steps of a whole run beside steps of TRL's GRPO trainer, on the pretrained model.

Both sides train on the same tasks of examples/real with as many prompts, samples and new tokens a
step, without speculation. They take turns of one step each; the other side rests. A step of
Paceline lasts from its rollouts to the commit of the new weights. TRL generates with transformers.
Its products are in bfloat16 of float32 weights, as Paceline's are, or in another --trl-dtype.

The tasks need reasoning-gym (`python examples/real/fetch_model.py --tasks` prints its directory
for PYTHONPATH), and TRL an environment of its own: `--install` makes it with pip.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import start_drafters
from benchmarks.demo_runs import WITHOUT, DemoPlan, DemoRun
from benchmarks.options import above_zero
from benchmarks.peers.environments import install, python_of
from benchmarks.processes import BenchChild, answering
from benchmarks.result import BenchResult, Row, paired_ratio, ratio_goal, say
from benchmarks.turns import STEP_S, finished_in_turns
from paceline.cli.run_files import merged
from paceline.local.patience import patient
from paceline.local.processes import child_environment
from paceline.report.machine import versions
from paceline.tasks.generated import generate_records

STEP_GOAL, WARM_STEPS, FEWEST_PAIRS = 2.0, 2, 3
"""RL steps/s over TRL's, steps that do not count, and pairs for a verdict."""
THREADS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    option = parser.add_argument
    option("--steps", type=above_zero(int), default=12, help="of each side; the first two warm up")
    option("--trl-dtype", choices=("mixed", "bfloat16", "float32"), default="mixed")
    option("--install", action="store_true", help="first make TRL's environment")
    option("--out", type=Path, default=Path("runs/bench-trl"), help="folder of Paceline's run")
    option("overrides", nargs="*", metavar="section.key=value", help="settings of Paceline's run")


async def run(options: argparse.Namespace) -> BenchResult:
    """Trains on both sides. Raises NotFound without TRL, Unavailable if it dies, and the errors of
    turns.finished_in_turns.
    """
    if options.install:
        await install(["trl"])
    tree = merged([start_drafters.REAL], options.overrides)
    settings = ["coordinator.evaluation.every=0", *options.overrides]
    out = options.out.absolute()
    plan = DemoPlan(out, 0, "none", options.steps, settings, WITHOUT, start_drafters.REAL)
    theirs = list[Mapping[str, Any]]()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-trl-")))
        trainer, found = await _started(options, tree, folder, stack)

        async def step() -> None:
            if len(theirs) < options.steps:
                trainer.tell()
                theirs.append(await trainer.answer(patient(STEP_S)))
                say(f"TRL, step {len(theirs)}: {theirs[-1]['step_s']:.1f} s")

        (ours,) = await finished_in_turns([plan], beside=step)
    title = f"{options.steps} steps, TRL in {options.trl_dtype}"
    return compare(ours, theirs, title, versions() | found)


async def _started(
    options: argparse.Namespace, tree: Mapping[str, Any], folder: Path, stack: AsyncExitStack
) -> tuple[BenchChild, dict[str, str]]:
    """TRL's trainer with its model loaded, and its versions; `stack` ends it."""
    script = Path(__file__).parent / "peers" / "trl_side.py"
    environment = child_environment({"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"})
    environment.pop("PYTHONPATH", None)  # its packages are its environment's
    command = (str(python_of("trl")), str(script))
    child = await stack.enter_async_context(answering("TRL", command, environment=environment))
    child.tell(**_plan(options, tree, folder))
    answer = await child.answer(patient(STEP_S))
    return child, dict(answer["versions"])


def _plan(options: argparse.Namespace, tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The first request of trl_side.py; writes the tasks."""
    coordinator, tasks = tree["coordinator"], folder / "tasks.jsonl"
    prompts = coordinator["prompts_per_step"]
    wanted = islice(generate_records(coordinator["tasks_path"]), options.steps * prompts)
    system = {"role": "system", "content": coordinator["system_prompt"]}
    asked = [
        {"prompt": [system, {"role": "user", "content": one["prompt"]}], "answer": one["answer"]}
        for _, one in wanted
    ]
    tasks.write_text("".join(json.dumps(one) + "\n" for one in asked), encoding="utf-8")
    return {
        "model": str(Path(tree["gateway"]["model"]).expanduser()),
        "tasks": str(tasks),
        "dtype": options.trl_dtype,
        "threads": THREADS,
        "steps": options.steps,
        "prompts": prompts,
        "samples": coordinator["samples_per_task"],
        "new_tokens": coordinator["sampling"]["max_tokens"],
        "seed": 0,
        "scratch": str(folder / "trl"),
    }


def compare(
    ours: DemoRun,
    theirs: Sequence[Mapping[str, Any]],
    title: str,
    found: Mapping[str, str] | None = None,
) -> BenchResult:
    """Rows of both sides and the goal; the first WARM_STEPS steps of either do not count."""
    pairs = list(zip(ours.steps, theirs, strict=False))[WARM_STEPS:]
    seconds = [(float(one["step_s"]), float(other["step_s"])) for one, other in pairs]
    ratio = paired_ratio([1 / one for one, _ in seconds], [1 / other for _, other in seconds])
    rows: list[Row] = [
        _row("Paceline", [one for one, _ in pairs], "response_tokens", "reward_mean"),
        _row("TRL", [other for _, other in pairs], "tokens", "reward"),
    ]
    goals = [ratio_goal("RL steps/s over TRL's", STEP_GOAL, ratio, FEWEST_PAIRS)]
    return BenchResult(title, rows, goals, versions=dict(found or {}))


def _row(side: str, steps: Sequence[Mapping[str, Any]], tokens: str, reward: str) -> Row:
    return {
        "side": side,
        "s a step": statistics.median(float(one["step_s"]) for one in steps),
        "tokens a step": statistics.median(float(one[tokens]) for one in steps),
        "mean reward": statistics.fmean(float(one.get(reward, 0.0)) for one in steps),
    }
