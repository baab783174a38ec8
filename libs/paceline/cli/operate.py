"""Defines the commands to a run that goes on: they ask its coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from paceline.cli.command import ConfigFiles, CoordinatorAddress, refused, run_to_exit
from paceline.errors import InvalidInput, PacelineError

if TYPE_CHECKING:
    from paceline.cli.access import Coordinator
    from paceline.cli.choice import Request


Run = Annotated[
    str | None,
    typer.Argument(help="the run, by directory, id or the coordinator's host:port"),
]


def status(run: Run = None, address: CoordinatorAddress = None, config: ConfigFiles = None) -> None:
    """Show what a running system does: phase, slots, versions, the last step."""
    from paceline.cli.status import show_status

    run_to_exit(show_status(_coordinator(address, config, run), Console()))


def stop(run: Run = None, address: CoordinatorAddress = None, config: ConfigFiles = None) -> None:
    """End a run with the step that runs now, and wait for it; Ctrl-C only ends the waiting."""
    from paceline.cli.choice import stop_run

    run_to_exit(stop_run(_coordinator(address, config, run), Console()))


def pause(run: Run = None, address: CoordinatorAddress = None, config: ConfigFiles = None) -> None:
    """Let a run rest after what is under way, and wait for it; agents get all workers then."""
    from paceline.cli.choice import pause_run

    run_to_exit(pause_run(_coordinator(address, config, run), Console()))


def resume(run: Run = None, address: CoordinatorAddress = None, config: ConfigFiles = None) -> None:
    """Let a paused run go on."""
    from paceline.cli.choice import resume_run

    run_to_exit(resume_run(_coordinator(address, config, run), Console()))


def rollback(
    version: Annotated[
        int | None,
        typer.Argument(min=0, help="drafter to go back to; else the one that served before"),
    ] = None,
    address: CoordinatorAddress = None,
    config: ConfigFiles = None,
) -> None:
    """Serve the former drafter again, from the next commit on and for a step at least."""
    from paceline.v1.coordinator_pb2 import RollBackRequest

    request = RollBackRequest(drafter_version=version)
    _choose(request, address, config)


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


def unpin(address: CoordinatorAddress = None, config: ConfigFiles = None) -> None:
    """Let promoted drafters serve again; withdraws a rollback that is due."""
    from paceline.v1.coordinator_pb2 import UnpinDrafterRequest

    _choose(UnpinDrafterRequest(), address, config)


def use_profile(
    profile: Annotated[str, typer.Argument(help="one of coordinator.profiles, or none")],
    address: CoordinatorAddress = None,
    config: ConfigFiles = None,
) -> None:
    """Round the policy to a profile (int8, fp8 ...), from the next one on."""
    from paceline.cli.choice import choose_profile

    name = "" if profile == "none" else profile
    run_to_exit(choose_profile(_coordinator(address, config), name, Console()))


def add_workers(
    count: Annotated[int, typer.Argument(min=1, help="how many")] = 1,
    address: CoordinatorAddress = None,
    config: ConfigFiles = None,
) -> None:
    """Add engine workers to a run, and wait for them; Ctrl-C only ends the waiting."""
    from paceline.cli.workers import add_workers as add

    run_to_exit(add(_coordinator(address, config), count, Console()))


def drain_workers(
    workers: Annotated[list[int], typer.Argument(min=0, help="which, by their numbers")],
    within: Annotated[
        float, typer.Option(min=0, help="seconds that their requests have to end there")
    ] = 5.0,
    address: CoordinatorAddress = None,
    config: ConfigFiles = None,
) -> None:
    """Have engine workers leave a run, and wait for it: others go on with what they run."""
    from paceline.cli.workers import drain_workers as drain

    run_to_exit(drain(_coordinator(address, config), workers, within, Console()))


def set_ranks(
    ranks: Annotated[int, typer.Argument(min=1, help="how many, at most the policy's slots")],
    run: Run = None,
    address: CoordinatorAddress = None,
    config: ConfigFiles = None,
) -> None:
    """Train a run's policy on so many ranks from its next step on, and wait for them."""
    from paceline.cli.ranks import set_ranks as train_on

    run_to_exit(train_on(_coordinator(address, config, run), ranks, Console()))


def _choose(request: Request, address: str | None, config: list[Path] | None) -> NoReturn:
    from paceline.cli.choice import choose_drafter

    run_to_exit(choose_drafter(_coordinator(address, config), request, Console()))


def _coordinator(
    address: str | None, config: list[Path] | None, run: str | None = None
) -> Coordinator:
    from paceline.cli.access import coordinator_of, find_coordinator

    files = list(config or [])
    try:
        if run is None:
            return coordinator_of(files, address)
        if address is not None:
            raise InvalidInput("RUN and --address name two places", seen=address, allowed=run)
        return find_coordinator(run, files)
    except PacelineError as error:
        raise refused(error) from error


COMMANDS = (
    *(status, stop, pause, resume, use_profile),
    *(add_workers, drain_workers, set_ranks),
)
DRAFTER_COMMANDS = (rollback, pin, unpin)
