"""Defines the commands of `paceline` and their options; the modules it calls do the work."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

import paceline
from paceline.errors import NotFound, PacelineError
from paceline.local.processes import keep_files_private
from paceline.local.services import SERVICES
from paceline.local.services import service as service_named
from paceline.speculators.kinds import SPECULATORS, drafter_directory

if TYPE_CHECKING:
    from paceline.cli.access import Coordinator
    from paceline.cli.choice import Request

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Reinforcement-learning post-training with speculative rollouts whose drafter learns in "
    "their idle time.",
)
console = Console(stderr=True)

# gRPC reads these when it is loaded: its remarks would tear the live view, and children are exec'ed
# at once.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

SERVICE_NAMES = [spec.command_name for spec in SERVICES if spec.address_key]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="settings, e.g. engine.dtype=float32", show_default=False
    ),
]


NoToken = Annotated[
    bool,
    typer.Option(
        "--no-token", help="make no tokens: every user of this machine may use and steer it"
    ),
]
ConfigFiles = Annotated[
    list[Path] | None, typer.Option(help="TOML file; later files win", exists=True)
]
CoordinatorAddress = Annotated[
    str | None,
    typer.Option(help="where the coordinator listens; else as the settings have it"),
]
REST = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command that hands its whole line, --help included, to a module."""

TOOLS = {
    "train-drafter": (
        "drafter_trainer.offline",
        "Train a drafter offline from conversations, for a warm start.",
    ),
    "export-drafter": (
        "drafter_trainer.export",
        "Write a trained drafter as SGLang's, vLLM's or Arctic's checkpoint.",
    ),
}
"""Command -> module that parses the rest of the line, and what the list of commands says of it."""


@app.command()
def version() -> None:
    """Print the version."""
    print(distribution_version("paceline"))


DRAFTERS = f"off | {' | '.join(SPECULATORS)}, a drafter's directory, or package.module:KIND"


@app.command()
def serve(
    service: Annotated[str, typer.Argument(help=" | ".join(SERVICE_NAMES))],
    overrides: Overrides = None,
    config: ConfigFiles = None,
    model: Annotated[
        Path | None, typer.Option(help="checkpoint directory in Hugging Face format")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="gateway: embedded | sglang | scripted")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help=f"gateway: {DRAFTERS}")] = None,
    http_port: Annotated[
        int | None, typer.Option(help="gateway: port of the OpenAI-compatible API")
    ] = None,
    grpc_port: Annotated[int | None, typer.Option(help="port of the gRPC API")] = None,
    no_token: NoToken = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the settings and exit")
    ] = False,
) -> None:
    """Run one service in this terminal.

    A gateway works alone: paceline serve gateway --model DIR
    """
    try:
        spec = service_named(service)
    except NotFound as error:
        raise _refused(error) from error

    given = {
        "model": model and model.resolve(),
        "engine.kind": engine,
        "drafter": drafter and _drafter(drafter),
        "addresses.http": http_port is not None and f"127.0.0.1:{http_port}",
        f"addresses.{spec.address_key}": grpc_port is not None and f"127.0.0.1:{grpc_port}",
    }
    settings = list(_settings(overrides, no_token))
    settings += [f'{key}="{value}"' for key, value in given.items() if value]
    files = [part for file in config or [] for part in ("--config", str(file))]
    flags = ["--print-config"] if print_config else []
    _become(spec.module, *spec.arguments, *files, *flags, *settings)


def _settings(overrides: list[str] | None, no_token: bool) -> tuple[str, ...]:
    return (*(overrides or ()), *(("security.run_tokens=false",) if no_token else ()))


def _drafter(value: str) -> str:
    """A directory as an absolute path; a name or "package.module:KIND" as it is."""
    directory = drafter_directory(value)
    return str(directory.resolve()) if directory else value


@app.command()
def up(
    overrides: Overrides = None,
    config: ConfigFiles = None,
    no_token: NoToken = False,
) -> None:
    """Start and supervise Redis and all services from one TOML; Ctrl-C stops them all."""
    from paceline.cli.up import run_up

    _run(run_up(list(config or []), _settings(overrides, no_token), console))


@app.command()
def plan(
    overrides: Overrides = None,
    config: ConfigFiles = None,
    gpus: Annotated[
        str,
        typer.Option(
            metavar="COUNTxGIB", help="for such GPUs, e.g. 8x80, instead of this machine's"
        ),
    ] = "",
) -> None:
    """Print what each service of a run takes of a GPU's memory, or why it cannot fit."""
    from paceline.cli.plan import parse_gpus, plan_run

    try:
        given = parse_gpus(gpus) if gpus else None
        lines = plan_run(list(config or []), list(overrides or ()), given).lines
    except PacelineError as error:
        raise _refused(error) from error
    print("\n".join(lines))


@app.command()
def demo(
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="RL steps")] = 150,
    seed: Annotated[int, typer.Option(help="seed of tasks and samples")] = 0,
    engine: Annotated[
        str, typer.Option(help="embedded | sglang (after make setup-sglang)")
    ] = "embedded",
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="decode without a drafter")
    ] = False,
    frozen_drafter: Annotated[
        Path | None, typer.Option(help="serve this drafter and never train it")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="ID", help="continue the run of this id")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of the runs")] = Path("runs"),
    no_token: NoToken = False,
) -> None:
    """Train a small policy and its drafter end to end on this machine, then write a report."""
    from paceline.cli.demo import run_demo
    from paceline.cli.run_files import DemoOptions

    options = DemoOptions(
        steps=steps,
        seed=seed,
        engine=engine,
        speculation=not no_speculation,
        frozen_drafter=frozen_drafter,
        resume=resume,
        out=out,
        overrides=_settings(overrides, no_token),
    )
    _run(run_demo(options, console))


@app.command()
def doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN | KEY=VALUE...]",
            help="a run that goes on, by directory, id or the coordinator's host:port; or settings "
            "of one that is to come",
            show_default=False,
        ),
    ] = None,
    config: ConfigFiles = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Check this machine before a run; or, with RUN, show who waits for whom in it."""
    from paceline.cli.access import find_coordinator
    from paceline.cli.doctor import check_machine, check_run

    files, given, out = list(config or []), list(words or []), Console()
    if len(given) == 1 and "=" not in given[0]:
        try:
            found = find_coordinator(given[0], files)
        except PacelineError as error:
            raise _refused(error) from error
        _run(check_run(found, out, as_json=as_json))
    _run(check_machine(files, given, out, as_json=as_json))


@app.command()
def status(address: CoordinatorAddress = None, config: ConfigFiles = None) -> None:
    """Show what a running system does: phase, slots, versions, the last step."""
    from paceline.cli.status import show_status

    _run(show_status(_coordinator(address, config), Console()))


@app.command()
def stop(address: CoordinatorAddress = None, config: ConfigFiles = None) -> None:
    """End a run with the step that runs now, and wait for it; Ctrl-C only ends the waiting."""
    from paceline.cli.stop import stop_run

    _run(stop_run(_coordinator(address, config), Console()))


@app.command()
def rollback(
    version: Annotated[
        int | None,
        typer.Argument(min=0, help="drafter to go back to; else the one that served before"),
    ] = None,
    policy: Annotated[
        int | None, typer.Option(min=0, help="refused: says how to go back to an older policy")
    ] = None,
    address: CoordinatorAddress = None,
    config: ConfigFiles = None,
) -> None:
    """Serve the former drafter again, from the next commit on and for a step at least."""
    from paceline.v1.coordinator_pb2 import RollBackRequest

    request = RollBackRequest(drafter_version=version, policy_version=policy)
    _choose(request, address, config)


@app.command()
def pin(
    version: Annotated[
        int | None, typer.Argument(min=0, help="drafter to keep; else the one that serves")
    ] = None,
    address: CoordinatorAddress = None,
    config: ConfigFiles = None,
) -> None:
    """Keep a drafter serving: what is promoted waits until it is unpinned."""
    from paceline.v1.coordinator_pb2 import PinDrafterRequest

    _choose(PinDrafterRequest(drafter_version=version), address, config)


@app.command()
def unpin(address: CoordinatorAddress = None, config: ConfigFiles = None) -> None:
    """Let promoted drafters serve again; withdraws a rollback that is due."""
    from paceline.v1.coordinator_pb2 import UnpinDrafterRequest

    _choose(UnpinDrafterRequest(), address, config)


def _choose(request: Request, address: str | None, config: list[Path] | None) -> NoReturn:
    from paceline.cli.choice import choose_drafter

    _run(choose_drafter(_coordinator(address, config), request, Console()))


@app.command(context_settings=REST)
def bench(context: typer.Context) -> None:
    """Run a benchmark of this checkout: paceline bench NAME [--json FILE] ..., or list."""
    root = Path(paceline.__file__).resolve().parents[2]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise _refused(
            NotFound(
                "benches are not part of the installed package",
                seen=root,
                allowed="a checkout: git clone, make setup",
            )
        )
    places = (str(root), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    _become("benchmarks", *context.args)


def _add_tool(name: str, module: str, help_text: str) -> None:
    @app.command(name, help=help_text, context_settings=REST)
    def run_tool(context: typer.Context) -> None:
        _become(module, *context.args)


for _name, _tool in TOOLS.items():
    _add_tool(_name, *_tool)


def _become(module: str, *arguments: str) -> NoReturn:
    """Hand this process over: signals reach the module directly and its exit code is ours."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606


def _coordinator(address: str | None, config: list[Path] | None) -> Coordinator:
    from paceline.cli.access import coordinator_of

    try:
        return coordinator_of(list(config or []), address)
    except PacelineError as error:
        raise _refused(error) from error


def _refused(error: PacelineError) -> typer.Exit:
    """The exit of a command that cannot work; says why."""
    console.print(f"[bold red]paceline:[/] {escape(str(error))}", highlight=False)
    return typer.Exit(2)


def _run(coroutine: Coroutine[Any, Any, int]) -> NoReturn:
    keep_files_private()
    try:
        raise typer.Exit(asyncio.run(coroutine))
    except PacelineError as error:
        raise _refused(error) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error


if __name__ == "__main__":
    app()
