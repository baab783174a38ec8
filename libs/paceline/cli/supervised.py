"""Supervises the services of a run until it ends or a signal arrives."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.command import LOCAL, Launcher
from paceline.cli.plan import Checked
from paceline.config import ServiceConfig
from paceline.local import launch, patience
from paceline.local.supervisor import Supervisor, run_launches

EXIT_INTERRUPTED = 130
_AFTER_ITS_OWN_S = 30.0
"""Extra seconds, so that a late service reports its own timeout first."""
_ALL_S = 300.0
"""Extra seconds for dependent services, beyond the slowest service's own deadline."""

_BACK_S = 120.0
"""Seconds for a lost node to return or be replaced."""
_STOP_GRACE_S = 20.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class StartSettings:
    """The start parameters of a run's services."""

    config: ServiceConfig  # the shared sections
    files: Sequence[Path]  # TOML, absolute
    overrides: Sequence[str]
    directory: Path
    plan: Checked
    again: bool = False  # restart after the loss of a node


@asynccontextmanager
async def supervisor_of(
    run: StartSettings, launcher: Launcher, on_event: Callable[[launch.ChildEvent], None]
) -> AsyncIterator[tuple[Supervisor, Sequence[str]]]:
    """Yields a supervisor of a run's processes, and extra address settings for services on several
    nodes.

    On a cluster it raises as on_cluster, before any start.
    """
    given = run.config, run.files, run.overrides
    if launcher.kind == LOCAL:
        supervisor = Supervisor(
            run_launches(*given),
            run.directory,
            on_event=on_event,
            health_s=_health_s(run.plan),
            heartbeat_s=run.config.run.heartbeat_s,
            hung_s=run.config.run.hung_s,
        )
        yield supervisor, []
        return
    from paceline.cluster.launcher import RunOnCluster, on_cluster
    from paceline.cluster.nodes import pools_of

    pools = pools_of(run.files, run.overrides)
    room_s = _BACK_S if run.again else 0.0
    asked = RunOnCluster(*given, run.directory, pools, _health_s(run.plan), room_s)
    async with on_cluster(asked, launcher.address, on_event) as cluster:
        supervisor = Supervisor(cluster.launches(), run.directory, keep=cluster.keep)
        yield supervisor, cluster.addresses


def _health_s(plan: Checked) -> float:
    """Seconds for the start of a service."""
    return patience.patient(plan.start_s + _AFTER_ITS_OWN_S)


async def supervise(
    supervisor: Supervisor, when_started: Callable[[], Awaitable[None]], plan: Checked
) -> bool:
    """Starts all services, awaits `when_started`, and waits for the end of the run.

    Returns True if the run ended by itself, False after a signal. Raises the supervisor's errors.
    The services still run at the return, so that they answer queries; always call stop_all().
    """

    async def work() -> None:
        await supervisor.start(_health_s(plan) + patience.patient(_ALL_S))
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
    """Stops every child; further signals do not interrupt it, so that no process is left."""
    with _stop_requests():
        await supervisor.stop(_STOP_GRACE_S)


@contextmanager
def _stop_requests() -> Iterator[asyncio.Event]:
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
