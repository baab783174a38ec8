"""Runs `paceline demo`: from the start policy to the report."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from paceline.cli.live import RunView
from paceline.cli.plan import Checked, plan_run
from paceline.cli.results import collect, print_results, write_results
from paceline.cli.run_files import DemoOptions, RunFiles, configure_run, find_run
from paceline.cli.up import EXIT_INTERRUPTED, stop_all, supervise, supervisor_of
from paceline.cli.watch import follow
from paceline.config import ServiceConfig, load_config
from paceline.errors import PacelineError
from paceline.local.launch import ChildEvent
from paceline.local.owner import SUPERVISOR, owned
from paceline.local.supervisor import run_launches
from paceline.local.tokens import use_run_tokens
from paceline.streams import LedgerCount

EXIT_FAILED = 1
_LAST_FACT_S = 2.0
_REFRESHED_S = 0.25


async def run_demo(options: DemoOptions, console: Console) -> int:
    """Run to the end and write the report (0), or stop at a signal (130) or a failure (1) and say
    how to go on.

    Leaves no process in any case. Raises ConfigError or NotFound for options that cannot work,
    FailedPrecondition for a run that runs already.
    """
    files = find_run(options)
    with owned(files.directory, SUPERVISOR):
        configure_run(files, options)
        return await _run(files, options, console)


async def _run(files: RunFiles, options: DemoOptions, console: Console) -> int:
    config = load_config(ServiceConfig, "local", [files.config])
    use_run_tokens(config)

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say(f"[bold]run {escape(files.run_id)}[/] in {escape(str(files.directory))}")
    plan = plan_run([files.config], [])
    for line in plan.lines:
        say(escape(line))
    code = 0
    try:
        pids: dict[str, int] = {}
        view = RunView(files.run_id, options.steps, console)
        ledger = await _play(files, config, plan, view, pids)
        if ledger is not None:
            print_results(write_results(files, ledger, pids), files, console)
            return 0
        say("stopped; no process is left")
        code = EXIT_INTERRUPTED
    except PacelineError as error:
        say(f"[bold red]the run failed:[/] {escape(str(error))}")
        code = EXIT_FAILED

    out = "" if options.out == Path("runs") else f" --out {options.out}"
    go_on = f"paceline demo --resume {files.run_id} --steps {options.steps}{out}"
    say(f"continue with: [bold]{escape(go_on)}[/]")
    return code


async def _play(
    files: RunFiles,
    config: ServiceConfig,
    plan: Checked,
    view: RunView,
    pids: dict[str, int],
) -> LedgerCount | None:
    """Start, show, wait, count the trajectories, stop; None when a signal ended it.

    Notes the process ids of the services in `pids`; raises what made the run fail.
    """

    def on_event(event: ChildEvent) -> None:
        if event.kind in ("started", "restarted"):
            pids[event.name] = event.pid
        view.event(event)

    launches = run_launches(config, [files.config], plan.overrides)
    supervisor = supervisor_of(config, launches, files.directory, plan, on_event)
    following: list[asyncio.Task[None]] = []

    async def started() -> None:
        view.started()
        following.append(asyncio.create_task(_follow(config, view)))

    with view:
        try:
            if not await supervise(supervisor, started, plan):
                return None
            await asyncio.wait(following, timeout=_LAST_FACT_S)
            view.say("writing the report")
            return await collect(config, files)
        finally:
            for task in following:
                task.cancel()
            view.say("stopping the services")
            await stop_all(supervisor)
            for defect in await asyncio.gather(*following, return_exceptions=True):
                if isinstance(defect, Exception):
                    raise defect


async def _follow(config: ServiceConfig, view: RunView) -> None:
    """Show the run's facts; without them the view stands still and the run goes on."""

    async def refresh() -> None:
        while True:
            view.refresh()
            await asyncio.sleep(_REFRESHED_S)

    refreshing = asyncio.create_task(refresh())
    try:
        await follow(config, view.state)
    except PacelineError as error:
        view.say(f"the view lost the run: {escape(str(error))}")
    finally:
        refreshing.cancel()
