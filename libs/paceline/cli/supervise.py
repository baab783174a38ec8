"""Runs a supervisor until its run is over or somebody asks it to stop.

Owns the signals; prints nothing.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from paceline.local.child import ChildEvent
from paceline.local.patience import patient
from paceline.local.supervisor import Supervisor

START_DEADLINE_S = 300.0
"""All services must be healthy by then."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAID = {"died": "bold red", "restarted": "yellow", "healthy": "green"}


async def supervise(supervisor: Supervisor, when_started: Callable[[], Awaitable[None]]) -> bool:
    """Start all, await `when_started`, wait for the end of the run. True: it ended by itself;
    False: a signal came.

    Raises what the supervisor raises. The services still run when it returns, so that they can be
    asked; call supervisor.stop() in any case.
    """
    with _stop_requests() as stop:
        asked = asyncio.create_task(stop.wait())
        work = asyncio.create_task(_start_and_wait(supervisor, when_started))
        try:
            await asyncio.wait({asked, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return True
            return False
        finally:
            for task in (asked, work):
                task.cancel()
            await asyncio.gather(asked, work, return_exceptions=True)


async def stop_all(supervisor: Supervisor, grace_s: float = 20.0) -> None:
    """Stop every child; further signals do not interrupt it, so that none is left."""
    with _stop_requests():
        await supervisor.stop(grace_s)


def event_line(event: ChildEvent) -> str:
    """One line for the terminal, with rich markup."""
    style = _SAID.get(event.kind, "dim")
    detail = f": {event.detail}" if event.detail else ""
    return f"[{style}]{event.name} {event.kind}[/]{detail} [dim](pid {event.pid})[/]"


async def _start_and_wait(
    supervisor: Supervisor, when_started: Callable[[], Awaitable[None]]
) -> None:
    await supervisor.start(patient(START_DEADLINE_S))
    await when_started()
    await supervisor.wait_finished()


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
