"""Runs `paceline up`: all services of one run, until it ends."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from paceline.cli.launcher import Launcher
from paceline.cli.play import Play, play
from paceline.cli.run_files import files_of, note_settings
from paceline.config import ServiceConfig, load_config
from paceline.errors import ConfigError
from paceline.local.owner import SUPERVISOR, owned


async def run_up(
    files: Sequence[Path],
    overrides: Sequence[str],
    console: Console,
    launcher: Launcher,
    *,
    as_json: bool,
) -> int:
    """As play(), for the run with these settings, which are saved as its config.toml.

    Raises ConfigError for invalid settings, FailedPrecondition if the run is already active.
    """
    if not files and not overrides:
        raise ConfigError(
            "there is nothing to run",
            seen="no --config",
            allowed="a TOML file, which `paceline init` writes; or try `paceline demo`",
        )
    settings = [path.absolute() for path in files]
    run = files_of(load_config(ServiceConfig, "local", settings, overrides))
    words = [word for path in files for word in ("--config", str(path))]
    again = shlex.join(["paceline", "up", *launcher.words, *words, *overrides])
    with owned(run.directory, SUPERVISOR):
        if run.config not in settings:
            note_settings(run, settings, overrides)
        playing = Play(run, settings, overrides, again, launcher)
        return await play(playing, console, as_json=as_json)
