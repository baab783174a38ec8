"""Measures a policy on a file of tasks: `paceline eval`."""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from paceline.addresses import loopback
from paceline.config import ServiceConfig
from paceline.config.load import load_config
from paceline.local import patience, services, supervisor
from paceline.local.ports import free_ports
from paceline.local.tokens import use_run_tokens
from paceline.messages import task_specs
from paceline.report.solved import accuracy, pass_figures, truncated_share
from paceline.rpc import MOST_TASK_BYTES, channel, leased, rpc_errors
from paceline.tasks import Columns, Task
from paceline.tasks.file import TaskFile
from paceline.v1.rollout_pb2 import RunTasksRequest, SampleFinished
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub

_SOLVED_ABOVE = 0.5
"""Reward above which an answer solves its task."""
_ANSWER_S = 24 * 3600.0
_START_S = 900.0
"""Seconds for the start, which loads a model of any size."""


async def evaluate(
    model: Path,
    tasks: Sequence[Task],
    request: RunTasksRequest,
    overrides: Sequence[str],
    console: Console,
    *,
    as_json: bool,
) -> int:
    """Starts a gateway for the evaluation and prints the figures.

    `model`: an absolute path. `request`: the call of the gateway without its tasks.
    `overrides`: settings of the gateway. Raises ConfigError if settings cannot work. Raises
    Unavailable with the end of the log if the gateway does not start.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-eval-") as folder:
        names = ("gateway", "http", "coordinator")
        ports = zip(names, free_ports(len(names)), strict=True)
        words = [
            f"run.dir={folder}",
            *(f"addresses.{name}={loopback()}:{port}" for name, port in ports),
            f"gateway.model={model}",
            "gateway.drafter=off",
            *overrides,
        ]
        config = load_config(ServiceConfig, "local", [], words)
        use_run_tokens(config)
        # Without Redis: an evaluation writes no trajectories.
        launch = replace(
            supervisor.launch_of(services.service("gateway"), config, words), depends_on=()
        )
        request.context.CopyFrom(leased(config.security, config.run.id, 0, 1))
        request.tasks.extend(task_specs(enumerate(tasks), "eval"))
        async with supervisor.Supervisor([launch], Path(folder)) as gateway:
            console.print(f"starting the gateway of {model}", highlight=False)
            await gateway.start(patience.patient(_START_S))
            began = time.monotonic()
            samples = await _ask(config, request, console)
            seconds = time.monotonic() - began
    per_task, tokens = request.samples_per_task, sum(one.response_tokens for one in samples)
    count = max(len(samples), 1)
    figures: dict[str, float | int] = {
        "samples": len(samples),
        "accuracy": accuracy(samples, _SOLVED_ABOVE),
        **pass_figures(samples, per_task, _SOLVED_ABOVE),
        "reward": sum(one.reward.value for one in samples) / count,
        **reward_parts(samples),
        "response_tokens": tokens / count,
        "truncated": truncated_share(samples),
        "tokens_per_s": tokens / max(seconds, 1e-9),
    }
    if as_json:
        print(json.dumps(figures))
        return 0
    console.print(f"{model}, {per_task} samples of each of {len(tasks)} tasks", highlight=False)
    table = Table(show_header=False)
    for name, value in figures.items():
        table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else f"{value:,}")
    console.print(table)
    return 0


def open_prompts(
    path: Path, columns: Columns, prompts: int, overrides: Sequence[str] = ()
) -> Sequence[Task]:
    """The first tasks of a file; 0: all. Raises InvalidInput if tasks cannot be read, ConfigError
    if they exceed one call.
    """
    config = load_config(ServiceConfig, "local", [], overrides)
    tasks = TaskFile(str(path), columns=columns, python=config.run.verifiers_python)
    count = prompts or len(tasks)
    tasks.check_call("--prompts", count, most_bytes=MOST_TASK_BYTES, among=count)
    return tasks[:count]


def reward_parts(samples: Sequence[SampleFinished]) -> dict[str, float]:
    """Mean of each part of the rewards over the samples that have it, as `reward/NAME`."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.reward.parts.items():
            found.setdefault(f"reward/{name}", []).append(value)
    return {name: sum(values) / len(values) for name, values in sorted(found.items())}


async def _ask(
    config: ServiceConfig, request: RunTasksRequest, console: Console
) -> list[SampleFinished]:
    """Collects all samples, with a progress bar on a terminal."""
    samples: list[SampleFinished] = []
    total = len(request.tasks) * request.samples_per_task
    async with channel(config.addresses.gateway, config.security) as connection:
        stub = RolloutServiceStub(connection)  # type: ignore[no-untyped-call]
        with Progress(console=console, transient=True) as bar, rpc_errors():
            done = bar.add_task("samples", total=total)
            async for news in stub.RunTasks(request, timeout=_ANSWER_S):
                if news.HasField("sample"):
                    samples.append(news.sample)
                    bar.update(done, completed=len(samples))
    return samples
