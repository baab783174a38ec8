"""Provides options and exits that several commands of `paceline` share, and the launcher's name."""

import json
import os
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from paceline.errors import ConfigError, PacelineError
from paceline.local.processes import keep_files_private

LOCAL: Final = "local"
LauncherKind = Literal["local", "ray"]


@dataclass(frozen=True, slots=True)
class Launcher:
    """The launcher of a run's processes."""

    kind: LauncherKind = LOCAL
    address: str | None = None  # of a Ray cluster; None: a new cluster on this machine

    def __post_init__(self) -> None:
        if self.address is not None and self.kind == LOCAL:
            raise ConfigError("--address is a Ray cluster's; add --launcher ray", seen=self.address)

    @property
    def words(self) -> list[str]:
        """The command line options that select this launcher."""
        named = ["--launcher", self.kind] if self.kind != LOCAL else []
        return [*named, *(["--address", self.address] if self.address else [])]


console = Console(stderr=True)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="settings, e.g. engine.dtype=float32", show_default=False
    ),
]
NoToken = Annotated[
    bool,
    typer.Option(
        "--no-token", help="create no tokens: every user of this machine may use and steer the run"
    ),
]
Trackers = Annotated[
    list[str] | None,
    typer.Option(
        "--tracker",
        metavar="NAME",
        help="tensorboard, wandb or trackio: send each step's figures there; may be repeated",
    ),
]
ConfigFiles = Annotated[
    list[Path] | None, typer.Option(help="TOML file; later files win", exists=True)
]
CoordinatorAddress = Annotated[
    str | None, typer.Option(help="address of the coordinator; default: from the settings")
]
LineFormat = Annotated[
    Literal["text", "json"] | None,
    typer.Option(
        "--lines",
        help="form of the output: text lines or JSON objects; default: text on a terminal, else "
        "JSON",
        show_default=False,
    ),
]

LauncherOption = Annotated[
    LauncherKind, typer.Option("--launcher", help="launcher of the processes")
]
ClusterAddress = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="with --launcher ray: host:port of the cluster, or auto on its node; default: a "
        "cluster on this machine",
        show_default=False,
    ),
]

Json = Annotated[bool, typer.Option("--json", help="print JSON")]
RunPlace = Annotated[
    str | None,
    typer.Argument(help="the run, by directory or by its id below runs/", show_default=False),
]

MODEL = "checkpoint directory in Hugging Face format, or an id on the Hub: owner/name[@revision]"


def say(line: str) -> None:
    """Prints a line for the user on stderr, beside the command's result."""
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def print_object(kind: str, **facts: Any) -> None:
    """Prints a JSON object for programs on stdout; `at` is wall-clock seconds."""
    sys.stdout.write(json.dumps({"kind": kind, "at": time.time(), **facts}) + "\n")
    sys.stdout.flush()


def begin(lines: str | None, phase: str) -> bool:
    """Prints the first phase, before any slow import or lookup.

    Returns whether the output is JSON.
    """
    as_json = lines == "json" or (lines is None and not sys.stdout.isatty())
    if as_json:
        print_object("phase", phase=phase)
    else:
        say(phase)
    return as_json


def settings_of(
    overrides: list[str] | None, no_token: bool, trackers: list[str] | None = None
) -> tuple[str, ...]:
    """The settings from a command line."""
    followed = (f"coordinator.trackers={json.dumps(trackers)}",) if trackers else ()
    return (*(overrides or ()), *followed, *(("security.run_tokens=false",) if no_token else ()))


def become(module: str, *arguments: str) -> NoReturn:
    """Replaces this process by a module, which then gets signals directly and sets the exit
    code.
    """
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606


class Commands(TyperGroup):
    """Commands, of which a PacelineError is printed in one line, with exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command."""
        try:
            return super().invoke(ctx)
        except PacelineError as error:
            text = f"[bold red]paceline:[/] {escape(str(error))}"
            console.print(text, highlight=False, soft_wrap=True)
            raise typer.Exit(2) from error


def run_to_exit(coroutine: Coroutine[Any, Any, int]) -> NoReturn:
    """Runs a command's coroutine and exits with its status."""
    import asyncio  # keeps --help fast

    keep_files_private()
    try:
        raise typer.Exit(asyncio.run(coroutine))
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error
