"""Defines the commands of `paceline` and their options; other modules do the work."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

import paceline
from paceline.addresses import loopback
from paceline.cli import command, commands
from paceline.errors import NotFound
from paceline.local.hub import model_directory
from paceline.local.services import SERVICES, TINKER
from paceline.local.services import service as service_named
from paceline.speculators.kinds import SPECULATORS, drafter_directory

app = typer.Typer(
    cls=command.Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Reinforcement-learning post-training with speculative rollouts and a drafter that "
    "trains in idle time.",
)

# gRPC reads these at import. Its log lines would break the live view. Children exec at once and
# need no fork support.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

drafter = typer.Typer(no_args_is_help=True, help="Train and export drafters.")
app.add_typer(drafter, name="drafter")

SERVICE_NAMES = [spec.command_name for spec in (*SERVICES, TINKER) if spec.address_key]
REST = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command that passes its whole line, including --help, to a module."""


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version as distribution_version

        print(distribution_version("paceline"))
        raise typer.Exit


@app.callback()
def paceline_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="print the version and exit"
        ),
    ] = False,
) -> None:
    """Holds the options of `paceline` itself."""


DRAFTERS = f"off | {' | '.join(SPECULATORS)}, a drafter's directory, or package.module:KIND"


@app.command()
def serve(
    service: Annotated[str, typer.Argument(help=" | ".join(SERVICE_NAMES))],
    overrides: command.Overrides = None,
    config: command.ConfigFiles = None,
    model: Annotated[str | None, typer.Option(help=command.MODEL)] = None,
    engine: Annotated[str | None, typer.Option(help="gateway: embedded | sglang")] = None,
    drafter: Annotated[str | None, typer.Option(help=f"gateway: {DRAFTERS}")] = None,
    http_port: Annotated[
        int | None, typer.Option(help="gateway, tinker: port of the HTTP API")
    ] = None,
    grpc_port: Annotated[int | None, typer.Option(help="port of the gRPC API")] = None,
    gateway: Annotated[
        int, typer.Option(help="gateway: its number; addresses.more_gateways begins at 1")
    ] = 0,
    no_token: command.NoToken = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print the settings and exit")
    ] = False,
) -> None:
    """Run one service in this terminal.

    A gateway works alone: paceline serve gateway --model DIR. The front of the Tinker API starts
    the services that it needs: paceline serve tinker --model DIR
    """
    from paceline.cli.run_files import found_models

    spec = service_named(service)
    trained = drafter and drafter_directory(drafter)
    tinker = spec is TINKER and not print_config
    own, http = ("gateway.", "tinker_http") if tinker else ("", "http")
    given = {
        f"{own}model": model and model_directory(model, command.say).resolve(),
        f"{own}engine.kind": engine,
        f"{own}drafter": trained.resolve() if trained else drafter,
        f"addresses.{http}": http_port is not None and f"{loopback()}:{http_port}",
        f"addresses.{spec.address_key}": grpc_port is not None and f"{loopback()}:{grpc_port}",
    }
    chosen = [f'{key}="{value}"' for key, value in given.items() if value]
    settings = [*command.settings_of(overrides, no_token), *chosen]
    settings = [*found_models(config or [], chosen if tinker else [], command.say), *settings]
    if tinker:
        from paceline.cli.tinker import serve_tinker

        command.run_to_exit(serve_tinker(list(config or []), settings, command.console))
    files = [part for file in config or [] for part in ("--config", str(file))]
    flags = ["--print-config"] if print_config else []
    flags += ["--gateway", str(gateway)] if gateway else []
    command.become(spec.module, *spec.arguments, *files, *flags, *settings)


@app.command()
def up(
    overrides: command.Overrides = None,
    config: command.ConfigFiles = None,
    no_token: command.NoToken = False,
    tracker: command.Trackers = None,
    launcher: command.LauncherOption = command.LOCAL,
    address: command.ClusterAddress = None,
    lines: command.LineFormat = None,
) -> None:
    """Run Redis and all services from one TOML, then write a report; Ctrl-C stops them all."""
    read = ", ".join(map(str, config or [])) or "its settings"
    as_json = command.begin(lines, f"starting a run: reading {read}")
    chosen = command.Launcher(launcher, address)
    from paceline.cli.play import run_up

    settings = command.settings_of(overrides, no_token, tracker)
    command.run_to_exit(
        run_up(list(config or []), settings, command.console, chosen, as_json=as_json)
    )


@app.command()
def demo(
    overrides: command.Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="RL steps")] = 80,
    seed: Annotated[int, typer.Option(help="seed of tasks and samples")] = 0,
    engine: Annotated[
        Literal["embedded", "sglang"], typer.Option(help="sglang: after make setup-sglang")
    ] = "embedded",
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="decode without a drafter")
    ] = False,
    frozen_drafter: Annotated[
        Path | None, typer.Option(help="serve this drafter and never train it")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="settings file instead of examples/demo/demo.toml")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="ID", help="id of the run to continue")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of the runs")] = Path("runs"),
    no_token: command.NoToken = False,
    tracker: command.Trackers = None,
    launcher: command.LauncherOption = command.LOCAL,
    address: command.ClusterAddress = None,
    lines: command.LineFormat = None,
) -> None:
    """Train a small policy and its drafter end to end on this machine, then write a report."""
    as_json = command.begin(
        lines, f"starting {resume or 'a run of the demo'}, whose files are in {out}"
    )
    chosen = command.Launcher(launcher, address)
    from paceline.cli.play import run_demo
    from paceline.cli.run_files import DemoOptions

    options = DemoOptions(
        steps=steps,
        seed=seed,
        engine=engine,
        speculation=not no_speculation,
        frozen_drafter=frozen_drafter,
        config=config,
        resume=resume,
        out=out,
        overrides=command.settings_of(overrides, no_token, tracker),
    )
    command.run_to_exit(run_demo(options, command.console, chosen, as_json=as_json))


@app.command()
def doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN | KEY=VALUE...]",
            help="a live run, by directory, id or the coordinator's host:port; or settings of a "
            "future run",
            show_default=False,
        ),
    ] = None,
    config: command.ConfigFiles = None,
    as_json: command.Json = False,
) -> None:
    """Check this machine before a run; or, with RUN, show which service waits for which."""
    from paceline.cli.access import find_coordinator
    from paceline.cli.active import check_run
    from paceline.cli.doctor import check_machine

    files, given, out = list(config or []), list(words or []), Console()
    if len(given) == 1 and "=" not in given[0]:
        command.run_to_exit(check_run(find_coordinator(given[0], files), out, as_json=as_json))
    command.run_to_exit(check_machine(files, given, out, as_json=as_json))


for _command in commands.COMMANDS:
    app.command("eval" if _command is commands.evaluate_model else None)(_command)


@app.command(context_settings=REST)
def bench(context: typer.Context) -> None:
    """Run a benchmark of this checkout: paceline bench NAME [--json FILE] ..., or list."""
    root = Path(paceline.__file__).resolve().parents[2]
    if not (root / "benchmarks" / "__main__.py").is_file():
        message = "benches are not part of the installed package"
        raise NotFound(message, seen=root, allowed="a checkout: git clone, make setup")
    places = (str(root), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    command.become("benchmarks", *context.args)


@drafter.command(context_settings=REST)
def train(context: typer.Context) -> None:
    """Train a drafter offline from conversations, for a warm start."""
    command.become("paceline.services.drafter_trainer.offline", *context.args)


@drafter.command(context_settings=REST)
def export(context: typer.Context) -> None:
    """Write a trained drafter as SGLang's, vLLM's or Arctic's checkpoint."""
    command.become("paceline.services.drafter_trainer.export", *context.args)


if __name__ == "__main__":
    app()
