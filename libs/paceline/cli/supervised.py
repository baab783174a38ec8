"""Supervises the services of a run until it ends or a signal comes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.launcher import LOCAL, Launcher
from paceline.cli.plan import Checked
from paceline.config import ServiceConfig
from paceline.local.launch import ChildEvent
from paceline.local.patience import patient
from paceline.local.supervisor import Supervisor, run_launches, service_launches

EXIT_INTERRUPTED = 130
_AFTER_ITS_OWN_S = 30.0
"""A service that is late says so itself before it is given up here."""
_ALL_S = 300.0
"""For services that wait for others, beyond the slowest one's own deadline."""

_BACK_S = 120.0
"""For a lost node to come back, or another one in its place."""
_STOP_GRACE_S = 20.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class StartSettings:
    """What the services of a run are started with."""

    config: ServiceConfig  # the part that all of them share
    files: Sequence[Path]  # TOML, absolute
    overrides: Sequence[str]
    directory: Path
    plan: Checked
    again: bool = False  # after the loss of a node


@asynccontextmanager
async def supervisor_of(
    run: StartSettings, launcher: Launcher, on_event: Callable[[ChildEvent], None]
) -> AsyncIterator[tuple[Supervisor, Sequence[str]]]:
    """A supervisor of a run's processes, with the limits of its settings, and settings that are
    theirs besides: where services on several nodes listen.

    On a cluster: raises as on_cluster, before anything is started.
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
    from paceline.cluster.pools import pools_of

    pools = pools_of(run.files, run.overrides)
    room_s = _BACK_S if run.again else 0.0
    asked = RunOnCluster(*given, run.directory, pools, _health_s(run.plan), room_s)
    launches = service_launches(*given)
    async with on_cluster(asked, launcher.address, on_event) as cluster:
        supervisor = Supervisor(cluster.launches(launches), run.directory, keep=cluster.keep)
        yield supervisor, cluster.addresses


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
