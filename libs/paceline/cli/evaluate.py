"""Measures a policy on a file of tasks: `paceline eval`."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from paceline.addresses import loopback
from paceline.config import ServiceConfig, load_config
from paceline.errors import ConfigError
from paceline.local import patience, services, supervisor
from paceline.local.ports import free_ports
from paceline.local.tokens import use_run_tokens
from paceline.messages import task_specs
from paceline.report.solved import accuracy, pass_figures, truncated_share
from paceline.rpc import MOST_TASK_BYTES, channel, leased, rpc_errors
from paceline.tasks import USUAL, Columns, Task, open_tasks
from paceline.trajectory import TEMPERATURE
from paceline.v1.rollout_pb2 import RunTasksRequest, SampleFinished
from paceline.v1.rollout_pb2_grpc import RolloutServiceStub
from paceline.v1.trajectory_pb2 import PURPOSE_EVAL, SamplingParams

_ANSWER_S = 24 * 3600.0
_START_S = 900.0
"""Seconds for the start, which loads a model of any size."""


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """The options of `paceline eval`."""

    model: Path
    tasks: Path
    prompts: int  # number of prompts, from the beginning; 0: all
    samples: int
    temperature: float
    max_tokens: int
    reward: str
    environment: str
    solved_above: float
    seed: int
    overrides: Sequence[str]  # settings of the gateway
    columns: Columns = USUAL


async def evaluate(options: EvaluationOptions, console: Console, *, as_json: bool) -> int:
    """Starts a gateway for the evaluation and prints the figures.

    Raises InvalidInput if tasks cannot be read. Raises ConfigError if settings cannot work or the
    tasks exceed one call. Raises Unavailable with the end of the log if the gateway does not start.
    """
    tasks = _tasks(options)
    with tempfile.TemporaryDirectory(prefix="paceline-eval-") as folder:
        words = _settings(options, folder)
        config = load_config(ServiceConfig, "local", [], words)
        use_run_tokens(config)
        # Without Redis: an evaluation writes no trajectories.
        launch = replace(
            supervisor.launch_of(services.service("gateway"), config, words), depends_on=()
        )
        async with supervisor.Supervisor([launch], Path(folder)) as gateway:
            console.print(f"starting the gateway of {options.model}", highlight=False)
            await gateway.start(patience.patient(_START_S))
            began = time.monotonic()
            samples = await _ask(config, request_of(options, tasks, config), console)
            seconds = time.monotonic() - began
    figures = figures_of(samples, options, seconds)
    if as_json:
        print(json.dumps(figures))
    else:
        of = f"{options.model} on {options.tasks}, {options.samples} samples of a task"
        console.print(of, highlight=False, soft_wrap=True, markup=False)
        console.print(_table(figures))
    return 0


def _tasks(options: EvaluationOptions) -> Sequence[Task]:
    if not TEMPERATURE.holds(options.temperature):
        raise ConfigError("--temperature", seen=options.temperature, allowed=TEMPERATURE)
    tasks = open_tasks(str(options.tasks), columns=options.columns)
    count = options.prompts or len(tasks)
    tasks.check_call("--prompts", count, most_bytes=MOST_TASK_BYTES, among=count)
    return tasks[:count]


def _settings(options: EvaluationOptions, folder: str) -> list[str]:
    names = ("gateway", "http", "coordinator")
    ports = zip(names, free_ports(len(names)), strict=True)
    return [
        f"run.dir={folder}",
        *(f"addresses.{name}={loopback()}:{port}" for name, port in ports),
        f"gateway.model={options.model.absolute()}",
        "gateway.drafter=off",
        *options.overrides,
    ]


def request_of(
    options: EvaluationOptions, tasks: Sequence[Task], config: ServiceConfig
) -> RunTasksRequest:
    """The gateway's request; every sample has its own seed."""
    return RunTasksRequest(
        context=leased(config.security, config.run.id, 0, 1),
        purpose=PURPOSE_EVAL,
        tasks=task_specs(enumerate(tasks), "eval"),
        samples_per_task=options.samples,
        sampling=SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens),
        run_seed=options.seed,
        environment=options.environment,
        reward=options.reward,
    )


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


def figures_of(
    samples: Sequence[SampleFinished], options: EvaluationOptions, seconds: float
) -> dict[str, float | int]:
    """Accuracy as avg@k, pass@k for several samples per task, lengths and speed."""
    tokens = [one.response_tokens for one in samples]
    return {
        "samples": len(samples),
        "accuracy": accuracy(samples, options.solved_above),
        **pass_figures(samples, options.samples, options.solved_above),
        "reward": sum(one.reward.value for one in samples) / max(len(samples), 1),
        "response_tokens": sum(tokens) / max(len(samples), 1),
        "truncated": truncated_share(samples),
        "tokens_per_s": sum(tokens) / max(seconds, 1e-9),
    }


def _table(figures: Mapping[str, float | int]) -> Table:
    table = Table(show_header=False)
    for name, value in figures.items():
        table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else f"{value:,}")
    return table
