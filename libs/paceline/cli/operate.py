"""Defines the commands on an active run, which send requests to its coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from paceline.cli.command import ConfigFiles, CoordinatorAddress, run_to_exit
from paceline.errors import InvalidInput

if TYPE_CHECKING:
    from paceline.cli.access import Coordinator
    from paceline.cli.active import Request


Run = Annotated[
    str | None,
    typer.Argument(help="the run, by directory, id or the coordinator's host:port"),
]


def status(run: Run = None, address: CoordinatorAddress = None, config: ConfigFiles = None) -> None:
    """Show the state of a run: phase, slots, versions, the last step."""
    from paceline.cli.active import show_status

    run_to_exit(show_status(_coordinator(address, config, run), Console()))


def stop(run: Run = None, address: CoordinatorAddress = None, config: ConfigFiles = None) -> None:
    """End a run after the running step, and wait for it; Ctrl-C only ends the wait."""
    from paceline.cli.active import stop_run

    run_to_exit(stop_run(_coordinator(address, config, run), Console()))


def pause(run: Run = None, address: CoordinatorAddress = None, config: ConfigFiles = None) -> None:
    """Pause a run after the steps in progress, and wait for it; agents then get all workers."""
    from paceline.cli.active import pause_run

    run_to_exit(pause_run(_coordinator(address, config, run), Console()))


def resume(run: Run = None, address: CoordinatorAddress = None, config: ConfigFiles = None) -> None:
    """Continue a paused run."""
    from paceline.cli.active import resume_run

    run_to_exit(resume_run(_coordinator(address, config, run), Console()))


def rollback(
    version: Annotated[
        int | None,
        typer.Argument(min=0, help="drafter to serve; default: the former drafter"),
    ] = None,
    address: CoordinatorAddress = None,
    config: ConfigFiles = None,
) -> None:
    """Serve the former drafter again, from the next commit and for at least one step."""
    from paceline.v1.coordinator_pb2 import RollBackRequest

    request = RollBackRequest(drafter_version=version)
    _choose(request, address, config)


def pin(
    version: Annotated[
        int | None, typer.Argument(min=0, help="drafter to pin; default: the serving drafter")
    ] = None,
    address: CoordinatorAddress = None,
    config: ConfigFiles = None,
) -> None:
    """Pin the serving drafter: promoted drafters wait until it is unpinned."""
    from paceline.v1.coordinator_pb2 import PinDrafterRequest

    _choose(PinDrafterRequest(drafter_version=version), address, config)


def unpin(address: CoordinatorAddress = None, config: ConfigFiles = None) -> None:
    """Remove the pin, and withdraw a pending rollback."""
    from paceline.v1.coordinator_pb2 import UnpinDrafterRequest

    _choose(UnpinDrafterRequest(), address, config)


def use_profile(
    profile: Annotated[str, typer.Argument(help="one of coordinator.profiles, or none")],
    address: CoordinatorAddress = None,
    config: ConfigFiles = None,
) -> None:
    """Round the policy to a profile (int8, fp8 ...), from the next policy."""
    from paceline.cli.active import choose_profile

    name = "" if profile == "none" else profile
    run_to_exit(choose_profile(_coordinator(address, config), name, Console()))


def _choose(request: Request, address: str | None, config: list[Path] | None) -> NoReturn:
    from paceline.cli.active import choose_drafter

    run_to_exit(choose_drafter(_coordinator(address, config), request, Console()))


def _coordinator(
    address: str | None, config: list[Path] | None, run: str | None = None
) -> Coordinator:
    from paceline.cli.access import coordinator_of, find_coordinator

    files = list(config or [])
    if run is None:
        return coordinator_of(files, address)
    if address is not None:
        raise InvalidInput("RUN and --address name two places", seen=address, allowed=run)
    return find_coordinator(run, files)


COMMANDS = (status, stop, pause, resume, use_profile)
DRAFTER_COMMANDS = (rollback, pin, unpin)
