"""Commands of `paceline`.

Owns arguments and what a person reads; the work is done by the modules it calls.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from enum import StrEnum
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import paceline
from paceline.errors import NotFound, PacelineError
from paceline.local.services import service as service_named
from paceline.speculators.kinds import SPECULATORS, drafter_directory

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

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="settings, e.g. engine.dtype=float32", show_default=False
    ),
]


class Service(StrEnum):
    """What `serve` can start."""

    COORDINATOR = "coordinator"
    GATEWAY = "gateway"
    POLICY_TRAINER = "policy-trainer"
    DRAFTER_TRAINER = "drafter-trainer"


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
    service: Service,
    overrides: Overrides = None,
    config: Annotated[
        list[Path] | None, typer.Option(help="TOML file; later files win", exists=True)
    ] = None,
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
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the settings and exit")
    ] = False,
) -> None:
    """Run one service in this terminal.

    A gateway works alone: paceline serve gateway --model DIR
    """
    settings = list(overrides or [])
    settings += [f'model="{model.resolve()}"'] if model else []
    settings += [f'engine.kind="{engine}"'] if engine else []
    settings += [f'drafter="{_drafter(drafter)}"'] if drafter else []
    settings += [f'addresses.http="127.0.0.1:{http_port}"'] if http_port is not None else []
    spec = service_named(service.value)
    settings += (
        [f'addresses.{spec.address_key}="127.0.0.1:{grpc_port}"'] if grpc_port is not None else []
    )
    files = [part for file in config or [] for part in ("--config", str(file))]
    flags = ["--print-config"] if print_config else []
    # The service takes this process over: signals reach it directly and its exit code is ours.
    os.execv(sys.executable, [sys.executable, "-m", spec.module, *files, *flags, *settings])  # noqa: S606


def _drafter(value: str) -> str:
    """A directory as an absolute path; a name or "package.module:KIND" as it is."""
    directory = drafter_directory(value)
    return str(directory.resolve()) if directory else value


@app.command()
def up(
    overrides: Overrides = None,
    config: Annotated[
        list[Path] | None, typer.Option(help="TOML file; later files win", exists=True)
    ] = None,
) -> None:
    """Start and supervise Redis and all services from one TOML; Ctrl-C stops them all."""
    from paceline.cli.up import run_up

    raise typer.Exit(_run(run_up(list(config or []), list(overrides or []), console)))


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
) -> None:
    """Train a small policy and its drafter end to end on this machine, then write a report."""
    from paceline.cli.demo import DemoOptions, run_demo

    options = DemoOptions(
        steps=steps,
        seed=seed,
        engine=engine,
        speculation=not no_speculation,
        frozen_drafter=frozen_drafter,
        resume=resume,
        out=out,
        overrides=tuple(overrides or ()),
    )
    raise typer.Exit(_run(run_demo(options, console)))


@app.command()
def status(
    address: Annotated[str, typer.Option(help="address of the coordinator")] = "127.0.0.1:7400",
) -> None:
    """Show what a running system does: phase, slots, versions, the last step."""
    from paceline.cli.status import show_status

    raise typer.Exit(_run(show_status(address, Console())))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(name: str, context: typer.Context) -> None:
    """Run a benchmark and print its table; --json FILE keeps it.

    Benches are part of a checkout, not of the installed package. `paceline bench NAME --help`
    lists the options, `paceline bench list` the names.
    """
    root = Path(paceline.__file__).resolve().parents[2]
    if not (root / "benchmarks" / "__main__.py").is_file():
        error = NotFound("no benches here", seen=root, allowed="a checkout: git clone, make setup")
        console.print(f"[bold red]paceline:[/] {error}", highlight=False)
        raise typer.Exit(2)
    places = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-m", "benchmarks", *([] if name == "list" else [name])]
    os.execve(  # noqa: S606
        sys.executable, [*command, *context.args], os.environ | {"PYTHONPATH": places}
    )


def _add_tool(name: str, module: str, help_text: str) -> None:
    # Options and --help are the module's, which only then is imported, with all it needs.
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, help=help_text, context_settings=settings)
    def run_tool(context: typer.Context) -> None:
        os.execv(sys.executable, [sys.executable, "-m", module, *context.args])  # noqa: S606


for _name, _tool in TOOLS.items():
    _add_tool(_name, *_tool)


def _run(coroutine: Coroutine[Any, Any, int]) -> int:
    try:
        return asyncio.run(coroutine)
    except PacelineError as error:
        console.print(f"[bold red]paceline:[/] {error}", highlight=False)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    app()
