"""Plays a run: starts it, shows it until its end, writes its report. For `up` and `demo`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from paceline.cli.command import say
from paceline.cli.json_view import JsonView
from paceline.cli.launcher import LOCAL, Launcher
from paceline.cli.live import RunView
from paceline.cli.models import found_models
from paceline.cli.plan import Checked, plan_run
from paceline.cli.results import collect, write_results
from paceline.cli.run_files import RunFiles, note_settings
from paceline.cli.supervised import (
    EXIT_INTERRUPTED,
    StartSettings,
    stop_all,
    supervise,
    supervisor_of,
)
from paceline.cli.watch import follow
from paceline.cluster.order import START_AGAIN
from paceline.config import ServiceConfig, load_config
from paceline.errors import DataLoss, PacelineError, Unavailable
from paceline.local.launch import ChildEvent
from paceline.local.tokens import use_run_tokens
from paceline.streams import LedgerCount

EXIT_FAILED = 1
_TAKEN_UP = 3
"""Times that a run is taken up again by itself."""
_LAST_FACT_S = 2.0
_REFRESHED_S = 0.25
_STOPPED_S = 5.0
"""For the journal of a run that was stopped."""

View = RunView | JsonView


@dataclass(frozen=True, slots=True)
class Play:
    """A run to be started."""

    files: RunFiles
    settings: Sequence[Path]  # TOML files, absolute; later ones win
    overrides: Sequence[str]
    again: str  # the command that goes on with it
    launcher: Launcher


async def play(run: Play, console: Console, *, as_json: bool) -> int:
    """Starts the run and shows it to its end (0), a signal (130) or a failure (1); what it has done
    until then is written down in any case. Leaves no process. Whoever calls owns its directory.

    Raises ConfigError for settings that cannot work.
    """
    config = load_config(ServiceConfig, "local", run.settings, run.overrides)
    models = found_models(run.settings, run.overrides, say)
    run = replace(run, overrides=[*run.overrides, *models])
    elsewhere = run.launcher.kind != LOCAL
    plan = plan_run(run.settings, run.overrides, elsewhere=elsewhere)
    use_run_tokens(config)
    named = run.files.run_id, plan.steps
    view = JsonView(*named) if as_json else RunView(*named, console)
    view.begin(run.files.directory, plan.lines)
    pids: dict[str, int] = {}
    code, ledger = EXIT_FAILED, None
    try:
        finished, ledger = await _taken_up(run, config, plan, view, pids)
        code = 0 if finished else EXIT_INTERRUPTED
        if not finished:
            view.line("stopped; no process is left")
    except PacelineError as error:
        view.failed(str(error))
    if ledger is not None:
        _write_down(run.files, ledger, pids, view)
    if code:
        view.again(run.again)
    return code


def _write_down(files: RunFiles, ledger: LedgerCount, pids: dict[str, int], view: View) -> None:
    """Steps, summary and report, of a run that was stopped too; one that has not begun has none."""
    try:
        summary = write_results(files, ledger, pids)
    except DataLoss as error:
        view.line(f"no report: {error}")
        return
    view.results(summary, files)


async def _taken_up(
    run: Play, config: ServiceConfig, plan: Checked, view: View, pids: dict[str, int]
) -> tuple[bool, LedgerCount | None]:
    """As _shown, again from its journal after the loss of a node."""
    for left in reversed(range(_TAKEN_UP + 1)):
        try:
            return await _shown(run, config, plan, view, pids, again=left < _TAKEN_UP)
        except Unavailable as error:
            if error.reason != START_AGAIN or not left:
                raise
            view.line(f"{error}; the run is taken up again on the nodes that there are")
    raise AssertionError("the last try returns or raises")


async def _shown(
    run: Play,
    config: ServiceConfig,
    plan: Checked,
    view: View,
    pids: dict[str, int],
    *,
    again: bool,
) -> tuple[bool, LedgerCount | None]:
    """Start, show, wait, count the trajectories, stop; False when a signal ended it.

    Notes the process ids of the services in `pids`; raises what made the run fail.
    """

    def on_event(event: ChildEvent) -> None:
        if event.kind in ("started", "restarted"):
            pids[event.name] = event.pid
        view.event(event)

    overrides = [*run.overrides, *plan.overrides]
    settings = StartSettings(config, run.settings, overrides, run.files.directory, plan, again)
    following: list[asyncio.Task[None]] = []

    async def started() -> None:
        view.started(config)
        following.append(asyncio.create_task(_follow(config, view)))

    with view:
        if run.launcher.kind != LOCAL:
            view.say("joining the cluster")
        async with supervisor_of(settings, run.launcher, on_event) as (supervisor, addresses):
            if addresses:
                config = load_config(ServiceConfig, "local", run.settings, [*overrides, *addresses])
                note_settings(run.files, run.settings, [*run.overrides, *addresses])
            try:
                finished = await supervise(supervisor, started, plan)
                if finished:
                    await asyncio.wait(following, timeout=_LAST_FACT_S)
                return finished, await _count(run, config, view, finished) if following else None
            finally:
                for task in following:
                    task.cancel()
                view.say("stopping the services")
                await stop_all(supervisor)
                for defect in await asyncio.gather(*following, return_exceptions=True):
                    if isinstance(defect, Exception):
                        raise defect


async def _count(
    run: Play, config: ServiceConfig, view: View, finished: bool
) -> LedgerCount | None:
    """Copies the journal and counts the trajectories. Of a run that was stopped, if Redis is there:
    whoever has pressed Ctrl-C does not wait for it.
    """
    try:
        async with asyncio.timeout(None if finished else _STOPPED_S):
            return await collect(config, run.files)
    except (PacelineError, TimeoutError) as error:
        if finished:
            raise
        view.line(f"no report for now: {error}; later: paceline report {run.files.directory}")
        return None


async def _follow(config: ServiceConfig, view: View) -> None:
    """Show the run's facts; without them the view stands still and the run goes on."""

    async def refresh() -> None:
        while True:
            view.refresh()
            await asyncio.sleep(_REFRESHED_S)

    refreshing = asyncio.create_task(refresh())
    try:
        await follow(config, view.state)
    except PacelineError as error:
        view.line(f"the view lost the run: {error}")
    finally:
        refreshing.cancel()
