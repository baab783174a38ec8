"""Defines the commands on runs, on a run's files and before a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from paceline.cli import command
from paceline.cli.command import ConfigFiles, CoordinatorAddress
from paceline.errors import InvalidInput
from paceline.local.hub import model_directory

_TASK_PARTS = ("prompt", "answer", "task_id", "system")
_GENERATED = "reasoning_gym:FAMILY,FAMILY"
_REWARD = "rule, or package.module:rule; default: math_answer, of generated tasks reasoning_gym"
_ENVIRONMENT = "name, verifiers:ID[?ARGUMENT=VALUE&...] or openenv:URL"
Run = Annotated[
    str | None, typer.Argument(help="the run, by directory, id or the coordinator's host:port")
]


Against = Annotated[
    str,
    typer.Option(
        metavar="RUN", help="another run, beside this one: settings that differ, dashed lines"
    ),
]


def status(run: Run = None, address: CoordinatorAddress = None, config: ConfigFiles = None) -> None:
    """Show the state of a run: phase, slots, versions, the last step."""
    _operate("show_status", run, address, config)


def stop(run: Run = None, address: CoordinatorAddress = None, config: ConfigFiles = None) -> None:
    """End a run after the running step, and wait for it; Ctrl-C only ends the wait."""
    _operate("stop_run", run, address, config)


def pause(run: Run = None, address: CoordinatorAddress = None, config: ConfigFiles = None) -> None:
    """Pause a run after the steps in progress, and wait for it; agents then get all workers."""
    _operate("pause_run", run, address, config)


def resume(run: Run = None, address: CoordinatorAddress = None, config: ConfigFiles = None) -> None:
    """Continue a paused run."""
    _operate("resume_run", run, address, config)


def _operate(
    function: str, run: str | None, address: str | None, config: list[Path] | None
) -> NoReturn:
    """Runs a function of active.py, which is slow to import, on the coordinator of a run."""
    from paceline.cli import access, active

    if run is not None and address is not None:
        raise InvalidInput("RUN and --address name two places", seen=address, allowed=run)
    coordinator = access.find_coordinator(run, config or [], address)
    command.run_to_exit(getattr(active, function)(coordinator, Console()))


def report(run: command.RunPlace = None, config: ConfigFiles = None, against: Against = "") -> None:
    """Write summary and report of a run at any time."""
    from paceline.cli.report import report_run

    command.run_to_exit(report_run(run, config or [], command.console, against))


def page(
    run: command.RunPlace = None,
    config: ConfigFiles = None,
    port: Annotated[int, typer.Option(min=0, help="port on loopback; 0: any free port")] = 0,
    against: Against = "",
) -> None:
    """Serve a live page about a run to browsers on this machine."""
    from paceline.cli.page import serve_page

    command.run_to_exit(serve_page(run, config or [], port, command.console, against))


def why(
    run: Annotated[str, typer.Argument(help="the run, by directory or by its id below runs/")],
    step: Annotated[
        int | None, typer.Argument(help="number of a step; default: the slowest", min=0)
    ] = None,
) -> None:
    """Print the critical path of a step beside the median step's, and its main cause."""
    from paceline.cli.report import show_why

    show_why(run, step, Console())


def evaluate_model(
    model: Annotated[str, typer.Argument(help=command.MODEL)],
    tasks: Annotated[Path, typer.Argument(help=f"task file, {_GENERATED}, or verifiers:ID[#eval]")],
    overrides: command.Overrides = None,
    prompts: Annotated[
        int, typer.Option(min=0, help="number of prompts, from the beginning; 0: all")
    ] = 0,
    samples: Annotated[
        int, typer.Option(min=1, help="answers per prompt, for avg@k and pass@k")
    ] = 1,
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="maximum tokens of an answer")] = 512,
    reward: Annotated[str, typer.Option(help=_REWARD)] = "",
    environment: Annotated[
        str, typer.Option(help=f"{_ENVIRONMENT}; default: single_turn, or that of the tasks")
    ] = "",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="PART=COLUMN", help="columns of prompt, answer, task_id, system"),
    ] = None,
    as_json: command.Json = False,
) -> None:
    """Measure a policy on a file of tasks, with its own gateway.

    Settings of the gateway: paceline eval DIR FILE gateway.engine.workers=2
    """
    from paceline.cli.evaluate import evaluate, open_prompts
    from paceline.tasks import Columns
    from paceline.tasks.generated import environment_of, usual_reward
    from paceline.trajectory import TEMPERATURE
    from paceline.v1 import rollout_pb2, trajectory_pb2

    if not TEMPERATURE.holds(temperature):
        raise InvalidInput("--temperature", seen=temperature, allowed=TEMPERATURE)
    columns = dict(one.partition("=")[::2] for one in column or [])
    for part, name in columns.items():
        if part not in _TASK_PARTS or not name:
            allowed = f"{' | '.join(_TASK_PARTS)}=COLUMN"
            raise InvalidInput("--column", seen=f"{part}={name}", allowed=allowed)
    request = rollout_pb2.RunTasksRequest(
        purpose=trajectory_pb2.PURPOSE_EVAL,
        samples_per_task=samples,
        sampling=trajectory_pb2.SamplingParams(temperature=temperature, max_tokens=max_tokens),
        run_seed=seed,
        environment=environment or environment_of(tasks),
        reward=reward or usual_reward(tasks, environment),
    )
    opened = open_prompts(tasks, Columns(**columns), prompts, overrides or ())
    directory = model_directory(model, command.say).absolute()
    command.run_to_exit(
        evaluate(directory, opened, request, overrides or (), command.console, as_json=as_json)
    )


def init(
    model: Annotated[str, typer.Argument(help=command.MODEL)],
    out: Annotated[Path, typer.Option(help="file to write")] = Path("paceline.toml"),
    tasks: Annotated[
        Path | None,
        typer.Option(help=f"task file, or {_GENERATED}; default: agents bring the tasks"),
    ] = None,
    heldout: Annotated[Path | None, typer.Option(help="task file of evaluations")] = None,
    reward: Annotated[str, typer.Option(help=_REWARD)] = "",
    agents: Annotated[
        bool, typer.Option("--agents", help="agents claim the tasks; default: the gateway answers")
    ] = False,
    environment: Annotated[
        str, typer.Option(help=f"{_ENVIRONMENT}; verifiers has own tasks; default: single_turn")
    ] = "",
    verifiers_python: Annotated[
        str, typer.Option(metavar="PATH", help="Python with verifiers; default: Paceline's")
    ] = "",
) -> None:
    """Write a commented TOML of a run that trains a model."""
    from paceline.cli.plan import write_settings

    given = {"tasks": tasks, "heldout": heldout, "reward": reward, "agents": agents}
    given |= {"environment": environment, "python": verifiers_python}
    plan = write_settings(out, model, given, command.say)
    shown = Console()
    for line in plan.lines:
        shown.print(line, highlight=False, soft_wrap=True, markup=False)
    shown.print(f"wrote {out}; run it with: paceline up --config {out}", highlight=False)


COMMANDS: tuple[Callable[..., None], ...] = (
    *(status, stop, pause, resume, report, page, why, evaluate_model, init),
)
