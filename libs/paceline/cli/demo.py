"""Runs `paceline demo`: creates the settings of a demo run and plays the run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from paceline.cli.launcher import Launcher
from paceline.cli.play import Play, play
from paceline.cli.run_files import DemoOptions, configure_run, find_run
from paceline.local.owner import SUPERVISOR, owned


async def run_demo(
    options: DemoOptions, console: Console, launcher: Launcher, *, as_json: bool
) -> int:
    """As play(), for a new run or a resumed run.

    Raises ConfigError or NotFound for invalid options, FailedPrecondition if the run is already
    active.
    """
    files = find_run(options)
    out = "" if options.out == Path("runs") else f" --out {options.out}"
    on = "".join(f" {word}" for word in launcher.words)
    again = f"paceline demo --resume {files.run_id} --steps {options.steps}{out}{on}"
    with owned(files.directory, SUPERVISOR):
        configure_run(files, options)
        playing = Play(files, [files.config], (), again, launcher)
        return await play(playing, console, as_json=as_json)
