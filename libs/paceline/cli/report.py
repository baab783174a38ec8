"""Rewrites the reports of runs and compares several runs: `paceline report`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import compress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.cli.access import directory_of
from paceline.cli.results import JOURNAL, collect, print_results, write_results
from paceline.cli.run_files import RunFiles, files_of
from paceline.config import ServiceConfig, load_config
from paceline.errors import FailedPrecondition, InvalidInput
from paceline.local.owner import SUPERVISOR, owned
from paceline.local.patience import patient
from paceline.local.redis import launcher
from paceline.local.services import service
from paceline.local.supervisor import Supervisor, launch_of
from paceline.report.compare import COLORS, ComparedRun, comparison, figures
from paceline.report.journal import read_history
from paceline.report.summary import Summary
from paceline.streams import LedgerCount
from paceline.whole_files import write_whole

_REDIS_S = 60.0


async def report_runs(
    runs: Sequence[str], settings: Sequence[Path], page: Path, console: Console
) -> int:
    """Writes steps, summary and report of each run up to now, whether active or ended.

    For several runs it also writes a comparison page. `settings`: settings of one run, instead of
    its name.

    Raises NotFound for an unknown run, Unavailable if its Redis cannot be read, DataLoss if it has
    not begun. Raises InvalidInput for more runs than the page has colors.
    """
    if len(runs) > COLORS:
        raise InvalidInput("too many runs for one page", seen=len(runs), allowed=f"1..{COLORS}")
    places = [directory_of(run, []) for run in runs] or [directory_of(None, settings)]
    found = [await _written(place) for place in places]
    if len(found) == 1:
        print_results(found[0][1], found[0][0], console)
        return 0
    named = {
        name: ComparedRun(summary, read_history(files.directory / JOURNAL))
        for name, (files, summary) in zip(_names(runs, found), found, strict=True)
    }
    write_whole(page, comparison(named))
    table = Table("", *named)
    for row in figures(named):
        table.add_row(*row)
    console.print(table)
    console.print(f"side by side: {page}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _names(runs: Sequence[str], found: Sequence[tuple[RunFiles, Summary]]) -> list[str]:
    """Ids of the runs if unique, otherwise the differing parts of their directories."""
    ids = [files.run_id for files, _ in found]
    if len(set(ids)) == len(ids):
        return ids
    parts = [files.directory.parts for files, _ in found]
    differing = [len(set(at)) > 1 for at in zip(*parts, strict=False)]
    names = ["/".join(compress(one, differing)) for one in parts]
    return names if len(set(names)) == len(names) else list(runs)


async def _written(directory: Path) -> tuple[RunFiles, Summary]:
    config = load_config(ServiceConfig, "local", [directory / "config.toml"])
    files = files_of(config)
    ledger = await _read(config, files)
    return files, write_results(files, ledger, _known_pids(files))


async def _read(config: ServiceConfig, files: RunFiles) -> LedgerCount:
    """Reads journal and ledger from the running Redis, or from a temporary server over the run's
    files.
    """
    if _serves(config):
        return await collect(config, files)
    with ExitStack() as stack:
        try:
            stack.enter_context(owned(files.directory, SUPERVISOR))
        except FailedPrecondition:
            return await collect(config, files)  # the run is active
        words = ["--config", str(files.config)]
        redis = Supervisor([launch_of(service("redis"), config, words)], files.directory)
        async with redis:
            await redis.start(patient(_REDIS_S))
            return await collect(config, files)


def _serves(config: ServiceConfig) -> bool:
    """Whether the run's durable Redis is running."""
    ours = launcher(config, "durable")
    if ours is None:
        return True  # an external server
    try:
        with owned(ours.directory.parent, ours.directory.name):
            return False
    except FailedPrecondition:
        return True


def _known_pids(files: RunFiles) -> dict[str, int]:
    if not files.summary.is_file():
        return {}
    kept: dict[str, Any] = json.loads(files.summary.read_text(encoding="utf-8"))
    return dict(kept.get("pids", {}))
