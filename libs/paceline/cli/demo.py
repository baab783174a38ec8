"""`paceline demo`: one run from start policy to report.

Owns the order of it; the services do the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rich.console import Console

from paceline.cli.closing import collect, print_closing, write_results
from paceline.cli.live import View, open_view
from paceline.cli.run_files import DemoOptions, RunFiles, prepare_run
from paceline.cli.run_state import RunState
from paceline.cli.supervise import stop_all, supervise
from paceline.cli.watch import follow
from paceline.config import ServiceConfig, load_config
from paceline.errors import PacelineError
from paceline.local.child import ChildEvent
from paceline.local.supervisor import Supervisor, run_launches
from paceline.streams import LedgerCount

__all__ = ["DemoOptions", "run_demo"]

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_LAST_FACT_S = 2.0


async def run_demo(options: DemoOptions, console: Console) -> int:
    """Run to the end and write the report (0), or stop at a signal (130) or a failure (1) and say
    how to go on.

    Leaves no process in any case. Raises ConfigError or NotFound for options that cannot work.
    """
    files = prepare_run(options)
    config = load_config(ServiceConfig, "local", [files.config])
    console.print(
        f"[bold]run {files.run_id}[/] in {files.directory}", highlight=False, soft_wrap=True
    )
    run = _Run(files, config, options.steps, console)
    try:
        finished = await run.play()
    except PacelineError as error:
        console.print(f"[bold red]the run failed:[/] {error}", highlight=False, soft_wrap=True)
        return _go_on(files, options, console, EXIT_FAILED)
    if not finished or run.ledger is None:
        console.print("stopped; no process is left", highlight=False)
        return _go_on(files, options, console, EXIT_INTERRUPTED)
    print_closing(write_results(files, run.ledger, run.pids), files, console)
    return 0


def _go_on(files: RunFiles, options: DemoOptions, console: Console, code: int) -> int:
    out = "" if options.out.as_posix() == "runs" else f" --out {options.out}"
    console.print(
        f"continue with: [bold]paceline demo --resume {files.run_id} --steps "
        f"{options.steps}{out}[/]",
        highlight=False,
        soft_wrap=True,
    )
    return code


class _Run:
    """One run while its processes live."""

    def __init__(
        self, files: RunFiles, config: ServiceConfig, steps: int, console: Console
    ) -> None:
        self._files = files
        self._config = config
        self._console = console
        self._on_event: Callable[[ChildEvent], None] = self._note_pid
        self.state = RunState(config.run.id, steps)
        self.pids: dict[str, int] = {}
        self.ledger: LedgerCount | None = None

    async def play(self) -> bool:
        """Start, show, wait, collect, stop.

        False when a signal ended it; raises what made it fail.
        """
        launches = run_launches(self._config, [self._files.config], [])
        supervisor = Supervisor(launches, self._files.directory, on_event=self._event)
        with open_view(self.state, self._console) as view:
            self._on_event = view.event
            following: list[asyncio.Task[None]] = []

            async def started() -> None:
                await view.started()
                following.append(asyncio.create_task(self._follow(view)))

            try:
                finished = await supervise(supervisor, started)
                if finished:
                    await asyncio.wait(following, timeout=_LAST_FACT_S)
                    view.say("writing the report")
                    self.ledger = await collect(self._config, self._files)
            finally:
                for task in following:
                    task.cancel()
                view.say("stopping the services")
                await stop_all(supervisor)
        for task in following:
            if task.done() and not task.cancelled():
                task.result()  # raises a defect of the view
        return finished

    async def _follow(self, view: View) -> None:
        try:
            await follow(self._config, self.state, view.record)
        except PacelineError as error:  # The view stands still, the run does not.
            self.state.notes.append(f"the view lost the run: {error}")
            view.say(f"the view lost the run: {error}")

    def _event(self, event: ChildEvent) -> None:
        self._note_pid(event)
        self.state.take_event(event)
        self._on_event(event)

    def _note_pid(self, event: ChildEvent) -> None:
        if event.kind in ("started", "restarted"):
            self.pids[event.name] = event.pid
