"""Plays a run for `paceline up` and `paceline demo`: starts it, shows it, writes its report."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from paceline.cli import command, live, report, run_files, supervised, watch
from paceline.cli.plan import Checked, plan_run
from paceline.cluster.order import START_AGAIN
from paceline.config import ServiceConfig, load_config
from paceline.errors import ConfigError, DataLoss, PacelineError, Unavailable
from paceline.local import launch, owner, tokens
from paceline.streams import LedgerCount

EXIT_FAILED = 1
_TAKEN_UP = 3
"""Maximum automatic resumes of a run."""
_LAST_FACT_S = 2.0
_REFRESHED_S = 0.25
_STOPPED_S = 5.0
"""Seconds to read the journal of an interrupted run."""

View = live.RunView | live.JsonView


@dataclass(frozen=True, slots=True)
class Play:
    """A run to start."""

    files: run_files.RunFiles
    settings: Sequence[Path]  # TOML files, absolute; later files win
    overrides: Sequence[str]
    again: str  # the command that continues it
    launcher: command.Launcher


async def play(run: Play, console: Console, *, as_json: bool) -> int:
    """Starts the run and shows it until its end (0), a signal (130) or a failure (1).

    Results so far are written in any case. Leaves no process. The caller owns the run's directory.
    Raises ConfigError for invalid settings.
    """
    config = load_config(ServiceConfig, "local", run.settings, run.overrides)
    models = run_files.found_models(run.settings, run.overrides, command.say)
    run = replace(run, overrides=[*run.overrides, *models])
    elsewhere = run.launcher.kind != command.LOCAL
    plan = plan_run(run.settings, run.overrides, elsewhere=elsewhere)
    tokens.use_run_tokens(config)
    named = run.files.run_id, plan.steps
    view = live.JsonView(*named) if as_json else live.RunView(*named, console)
    view.begin(run.files.directory, plan.lines)
    pids: dict[str, int] = {}
    code, ledger = EXIT_FAILED, None
    try:
        finished, ledger = await _taken_up(run, config, plan, view, pids)
        code = 0 if finished else supervised.EXIT_INTERRUPTED
        if not finished:
            view.line("stopped; no process is left")
    except PacelineError as error:
        view.failed(str(error))
    if ledger is not None:
        _write_down(run.files, ledger, pids, view)
    if code:
        view.again(run.again)
    return code


def _write_down(
    files: run_files.RunFiles, ledger: LedgerCount, pids: dict[str, int], view: View
) -> None:
    """Writes steps, summary and report, also for an interrupted run. A run that has not begun has
    none.
    """
    try:
        summary = report.write_results(files, ledger, pids)
    except DataLoss as error:
        view.line(f"no report: {error}")
        return
    view.results(summary, files)


async def _taken_up(
    run: Play, config: ServiceConfig, plan: Checked, view: View, pids: dict[str, int]
) -> tuple[bool, LedgerCount | None]:
    """As _shown; resumes the run from its journal after the loss of a node."""
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
    """Starts, shows, awaits and stops the run, and counts its trajectories. Returns False after a
    signal.

    Records the services' process ids in `pids`. Raises the error of a failed run.
    """

    def on_event(event: launch.ChildEvent) -> None:
        if event.kind in ("started", "restarted"):
            pids[event.name] = event.pid
        view.event(event)

    overrides = [*run.overrides, *plan.overrides]
    settings = supervised.StartSettings(
        config, run.settings, overrides, run.files.directory, plan, again
    )
    following: list[asyncio.Task[None]] = []

    async def started() -> None:
        view.started(config)
        following.append(asyncio.create_task(_follow(config, view)))

    with view:
        if run.launcher.kind != command.LOCAL:
            view.say("joining the cluster")
        async with supervised.supervisor_of(settings, run.launcher, on_event) as (
            supervisor,
            addresses,
        ):
            if addresses:
                config = load_config(ServiceConfig, "local", run.settings, [*overrides, *addresses])
                run_files.note_settings(run.files, run.settings, [*run.overrides, *addresses])
            try:
                finished = await supervised.supervise(supervisor, started, plan)
                if finished:
                    await asyncio.wait(following, timeout=_LAST_FACT_S)
                return finished, await _count(run, config, view, finished) if following else None
            finally:
                for task in following:
                    task.cancel()
                view.say("stopping the services")
                await supervised.stop_all(supervisor)
                for defect in await asyncio.gather(*following, return_exceptions=True):
                    if isinstance(defect, Exception):
                        raise defect


async def _count(
    run: Play, config: ServiceConfig, view: View, finished: bool
) -> LedgerCount | None:
    """Copies the journal and counts the trajectories.

    For an interrupted run this is limited to a few seconds, so that Ctrl-C does not wait for Redis.
    """
    try:
        async with asyncio.timeout(None if finished else _STOPPED_S):
            return await report.collect(config, run.files)
    except (PacelineError, TimeoutError) as error:
        if finished:
            raise
        view.line(f"no report for now: {error}; later: paceline report {run.files.directory}")
        return None


async def _follow(config: ServiceConfig, view: View) -> None:
    """Shows the run's facts. If they fail, the view freezes and the run continues."""

    async def refresh() -> None:
        while True:
            view.refresh()
            await asyncio.sleep(_REFRESHED_S)

    refreshing = asyncio.create_task(refresh())
    try:
        await watch.follow(config, view.state)
    except PacelineError as error:
        view.line(f"the view lost the run: {error}")
    finally:
        refreshing.cancel()


async def run_up(
    files: Sequence[Path],
    overrides: Sequence[str],
    console: Console,
    launcher: command.Launcher,
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
    run = run_files.files_of(load_config(ServiceConfig, "local", settings, overrides))
    words = [word for path in files for word in ("--config", str(path))]
    again = shlex.join(["paceline", "up", *launcher.words, *words, *overrides])
    with owner.owned(run.directory, owner.SUPERVISOR):
        if run.config not in settings:
            run_files.note_settings(run, settings, overrides)
        playing = Play(run, settings, overrides, again, launcher)
        return await play(playing, console, as_json=as_json)


async def run_demo(
    options: run_files.DemoOptions, console: Console, launcher: command.Launcher, *, as_json: bool
) -> int:
    """As play(), for a new run or a resumed run.

    Raises ConfigError or NotFound for invalid options, FailedPrecondition if the run is already
    active.
    """
    files = run_files.find_run(options)
    out = "" if options.out == Path("runs") else f" --out {options.out}"
    on = "".join(f" {word}" for word in launcher.words)
    again = f"paceline demo --resume {files.run_id} --steps {options.steps}{out}{on}"
    with owner.owned(files.directory, owner.SUPERVISOR):
        run_files.configure_run(files, options)
        playing = Play(files, [files.config], (), again, launcher)
        return await play(playing, console, as_json=as_json)
