"""Runs supervised services in a terminal, for `paceline up` and `paceline demo`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from paceline.cli.plan import Checked, plan_run
from paceline.config import ServiceConfig, load_config
from paceline.local.launch import ChildEvent, Launch
from paceline.local.owner import SUPERVISOR, owned
from paceline.local.patience import patient
from paceline.local.supervisor import Supervisor, run_launches
from paceline.local.tokens import AGENT, token_file, use_run_tokens

EXIT_INTERRUPTED = 130
_AFTER_ITS_OWN_S = 30.0
"""A service that is late says so itself before it is given up here."""
_ALL_S = 300.0
"""For services that wait for others, beyond the slowest one's own deadline."""

_STOP_GRACE_S = 20.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STYLES = {
    "died": "bold red",
    "given_up": "bold red",
    "impaired": "red",
    "waits": "bold yellow",
    "restarted": "yellow",
    "healthy": "green",
    "recovered": "green",
}


async def run_up(files: Sequence[Path], overrides: Sequence[str], console: Console) -> int:
    """Start and supervise everything until the run ends (0) or Ctrl-C (130). Leaves no process.

    Raises ConfigError for settings that cannot work, FailedPrecondition for a run that runs already
    and Unavailable, with the end of its log, for a service that fails.
    """
    config = load_config(ServiceConfig, "local", files, overrides)
    plan = plan_run(files, overrides)

    def show(event: ChildEvent) -> None:
        console.print(event_line(event), highlight=False, soft_wrap=True)

    async def started() -> None:
        console.print(
            f"[bold]everything serves[/]: API http://{config.addresses.http}/v1{_key(config)}, "
            f"coordinator {config.addresses.coordinator}; logs in "
            f"{escape(str(Path(config.run.dir) / 'logs'))}. Ctrl-C stops all.",
            highlight=False,
        )

    run_dir = Path(config.run.dir)
    for line in plan.lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    launches = run_launches(
        config, [path.absolute() for path in files], [*overrides, *plan.overrides]
    )
    supervisor = supervisor_of(config, launches, run_dir, plan, show)
    with owned(run_dir, SUPERVISOR):
        use_run_tokens(config)
        try:
            finished = await supervise(supervisor, started, plan)
        finally:
            await stop_all(supervisor)

    if finished:
        return 0
    console.print(
        "stopped; the run continues from its journal with the same command", highlight=False
    )
    return EXIT_INTERRUPTED


def _key(config: ServiceConfig) -> str:
    file = token_file(config, AGENT)
    return f" (key: {escape(str(file))})" if config.security.run_tokens else ""


def supervisor_of(
    config: ServiceConfig,
    launches: Sequence[Launch],
    run_dir: Path,
    plan: Checked,
    on_event: Callable[[ChildEvent], None],
) -> Supervisor:
    """A supervisor of a run's processes, with the limits of its settings."""
    return Supervisor(
        launches,
        run_dir,
        on_event=on_event,
        health_s=_health_s(plan),
        heartbeat_s=config.run.heartbeat_s,
        hung_s=config.run.hung_s,
    )


def _health_s(plan: Checked) -> float:
    """Seconds that a service may take to its start."""
    return patient(plan.start_s + _AFTER_ITS_OWN_S)


async def supervise(
    supervisor: Supervisor, when_started: Callable[[], Awaitable[None]], plan: Checked
) -> bool:
    """Start all, await `when_started`, wait for the end of the run. True: it ended by itself;
    False: a signal came.

    Raises what the supervisor raises. The services still run when it returns, so that they can be
    asked; call stop_all() in any case.
    """

    async def work() -> None:
        await supervisor.start(_health_s(plan) + patient(_ALL_S))
        await when_started()
        await supervisor.wait_finished()

    with _stop_requests() as stop:
        asked, working = asyncio.create_task(stop.wait()), asyncio.create_task(work())
        try:
            await asyncio.wait({asked, working}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            return working.done()
        finally:
            asked.cancel()
            working.cancel()
            await asyncio.gather(asked, working, return_exceptions=True)


async def stop_all(supervisor: Supervisor) -> None:
    """Stop every child; further signals do not interrupt it, so that none is left."""
    with _stop_requests():
        await supervisor.stop(_STOP_GRACE_S)


def event_line(event: ChildEvent) -> str:
    """One line for the terminal, with rich markup."""
    style = _STYLES.get(event.kind, "dim")
    detail = f": {escape(event.detail)}" if event.detail else ""
    return f"[{style}]{escape(event.name)} {event.kind}[/]{detail} [dim](pid {event.pid})[/]"


@contextmanager
def _stop_requests() -> Iterator[asyncio.Event]:
    """An event that signals set instead of ending the process."""
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
