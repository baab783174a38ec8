"""Plays a run for `paceline up` and `paceline demo`: starts it, shows it, writes its report."""

import asyncio
import shlex
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from paceline.cli import command, live, report, run_files
from paceline.cli.plan import Checked, plan_run
from paceline.cluster.keeper import START_AGAIN
from paceline.config import ServiceConfig
from paceline.config.load import load_config
from paceline.errors import ConfigError, DataLoss, PacelineError, Unavailable
from paceline.local import launch, processes, tokens
from paceline.local.patience import patient, unless
from paceline.local.supervisor import Supervisor, run_launches
from paceline.streams import LedgerCount

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
_RESUMES = 3
"""Maximum automatic resumes of a run."""
_LAST_FACT_S = 2.0
_STOPPED_S = 5.0
"""Seconds to read the journal of an interrupted run."""
_AFTER_ITS_OWN_S = 30.0
"""Extra seconds, so that a late service reports its own timeout first."""
_ALL_S = 300.0
"""Extra seconds for dependent services, beyond the slowest service's own deadline."""
_BACK_S = 120.0
"""Seconds for a lost node to return or be replaced."""
_STOP_GRACE_S = 20.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    plan = plan_run(run.settings, run.overrides, elsewhere=run.launcher.kind != command.LOCAL)
    tokens.use_run_tokens(config)
    view = live.RunView(run.files.run_id, plan.steps, console, as_json=as_json)
    view.show_start(run.files.directory, plan.lines)
    player = _Player(run, config, plan, view)
    code = EXIT_FAILED
    try:
        code = 0 if await player.play() else EXIT_INTERRUPTED
        if code:
            view.show_line("stopped; no process is left")
    except PacelineError as error:
        message = str(error)
        view.show("failed", f"[bold red]the run failed:[/] {escape(message)}", message=message)
    player.write_results(console, as_json=as_json)
    if code:
        view.show("continue", f"continue with: [bold]{escape(run.again)}[/]", command=run.again)
    return code


class _Player:
    """Starts, shows and stops the services of a run."""

    def __init__(self, run: Play, config: ServiceConfig, plan: Checked, view: live.RunView) -> None:
        self._run, self._config, self._plan, self._view = run, config, plan, view
        self._pids: dict[str, int] = {}
        self._ledger: LedgerCount | None = None  # None: the journal was not read
        self._health_s = patient(plan.start_s + _AFTER_ITS_OWN_S)

    async def play(self) -> bool:
        """Whether the run ended by itself; False after a signal.

        It resumes the run from its journal after the loss of a node. Raises the error of a failed
        run.
        """
        resumes = 0
        while True:
            try:
                return await self._play_once(again=resumes > 0)
            except Unavailable as error:
                if error.reason != START_AGAIN or resumes == _RESUMES:
                    raise
                resumes += 1
                self._view.show_line(f"{error}; the run is resumed on the remaining nodes")

    def write_results(self, console: Console, *, as_json: bool) -> None:
        """Writes and prints steps, summary and report of a run whose journal was read."""
        if self._ledger is None:
            return
        files = self._run.files
        try:
            summary = report.write_results(files, self._ledger, self._pids)
        except DataLoss as error:  # the run has not begun
            self._view.show_line(f"no report: {error}")
            return
        if as_json:
            command.print_object("summary", summary=summary, report=str(files.report))
        else:
            report.print_results(summary, files, console)

    async def _play_once(self, *, again: bool) -> bool:
        """Starts, shows, awaits and stops the run, and counts its trajectories."""
        run, view = self._run, self._view
        overrides = [*run.overrides, *self._plan.overrides]
        following: list[asyncio.Task[None]] = []
        with view:
            async with self._supervisor(overrides, again=again) as (supervisor, addresses):
                settings = [*overrides, *addresses]
                self._config = load_config(ServiceConfig, "local", run.settings, settings)
                if addresses:
                    noted = [*run.overrides, *addresses]
                    run_files.note_settings(run.files, run.settings, noted)
                try:
                    finished = await self._supervise(supervisor, following)
                    if finished:
                        await asyncio.wait(following, timeout=_LAST_FACT_S)
                    if following:
                        await self._collect(finished=finished)
                    return finished
                finally:
                    for task in following:
                        task.cancel()
                    view.show_phase("stopping the services")
                    with stop_requests():  # further signals leave no process behind
                        await supervisor.stop(_STOP_GRACE_S)
                    for defect in await asyncio.gather(*following, return_exceptions=True):
                        if isinstance(defect, Exception):
                            raise defect

    @asynccontextmanager
    async def _supervisor(
        self, overrides: Sequence[str], *, again: bool
    ) -> AsyncIterator[tuple[Supervisor, Sequence[str]]]:
        """Yields a supervisor of the run's processes, and address settings for services on several
        nodes. On a cluster it raises as on_cluster, before any start.
        """
        run, settings = self._run, self._config.run
        given = self._config, run.settings, overrides
        if run.launcher.kind == command.LOCAL:
            supervisor = Supervisor(
                run_launches(*given),
                run.files.directory,
                on_event=self._show_event,
                health_s=self._health_s,
                heartbeat_s=settings.heartbeat_s,
                hung_s=settings.hung_s,
            )
            yield supervisor, []
            return
        from paceline.cluster.launcher import RunOnCluster, on_cluster
        from paceline.cluster.nodes import pools_of

        self._view.show_phase("joining the cluster")
        pools, room_s = pools_of(run.settings, overrides), _BACK_S if again else 0.0
        asked = RunOnCluster(*given, run.files.directory, pools, self._health_s, room_s)
        async with on_cluster(asked, run.launcher.address, self._show_event) as cluster:
            launches, keep = cluster.launches(), cluster.keep
            yield Supervisor(launches, run.files.directory, keep=keep), cluster.addresses

    def _show_event(self, event: launch.ChildEvent) -> None:
        if event.kind in ("started", "restarted"):
            self._pids[event.name] = event.pid
        self._view.show_event(event)

    async def _supervise(self, supervisor: Supervisor, following: list[asyncio.Task[None]]) -> bool:
        """Starts all services, follows the run, and waits for its end; False after a signal.

        The services still run at the return, so that they answer queries. Raises the supervisor's
        errors.
        """

        async def work() -> None:
            await supervisor.start(self._health_s + patient(_ALL_S))
            self._view.show_services(self._config)
            following.append(asyncio.create_task(self._follow()))
            await supervisor.wait_finished()

        with stop_requests() as stop:
            return await unless(stop, work())

    async def _collect(self, *, finished: bool) -> None:
        """Copies the journal and counts the trajectories.

        For an interrupted run this is limited to a few seconds, so that Ctrl-C does not wait for
        Redis.
        """
        try:
            async with asyncio.timeout(None if finished else _STOPPED_S):
                self._ledger = await report.collect(self._config, self._run.files)
        except (PacelineError, TimeoutError) as error:
            if finished:
                raise
            later = f"paceline report {self._run.files.directory}"
            self._view.show_line(f"no report for now: {error}; later: {later}")

    async def _follow(self) -> None:
        """Shows the run's facts. If they fail, the view freezes and the run continues."""
        try:
            await live.follow(self._config, self._view.state)
        except PacelineError as error:
            self._view.show_line(f"the view lost the run: {error}")


@contextmanager
def stop_requests() -> Iterator[asyncio.Event]:
    """Yields an event that signals set instead of ending the process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


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
        allowed = "a TOML file, which `paceline init` writes; or try `paceline demo`"
        raise ConfigError("there is nothing to run", seen="no --config", allowed=allowed)
    settings = [path.absolute() for path in files]
    run = run_files.files_of(load_config(ServiceConfig, "local", settings, overrides))
    words = [word for path in files for word in ("--config", str(path))]
    again = shlex.join(["paceline", "up", *launcher.words, *words, *overrides])
    with processes.owned(run.directory, processes.SUPERVISOR):
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
    out = [] if options.out == Path("runs") else ["--out", str(options.out)]
    words = ["--resume", files.run_id, "--steps", str(options.steps), *out, *launcher.words]
    again = shlex.join(["paceline", "demo", *words])
    with processes.owned(files.directory, processes.SUPERVISOR):
        run_files.configure_run(files, options)
        playing = Play(files, [files.config], (), again, launcher)
        return await play(playing, console, as_json=as_json)
