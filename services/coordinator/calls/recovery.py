"""Waits for services that are away."""

from __future__ import annotations

import asyncio

from paceline.errors import PacelineError, Unavailable
from paceline.local.patience import patient
from paceline.rpc.progress import ASK_S, ask_progress
from paceline.services.coordinator.calls.base import Absence, Calls
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.state import OPTIONAL, Service

_LONGEST_PAUSE_S = 5.0


async def await_service(calls: Calls, command: commands.AwaitService) -> None:
    """Emits ServiceBack when the peer is healthy again, CallFailed when one that the run needs is
    not in time.
    """
    service = command.service
    absence = calls.absent.setdefault(service, Absence(calls.now()))
    while True:
        try:
            await _healthy_again(calls, command, absence)
        except PacelineError as error:
            if service not in OPTIONAL:
                calls.emit(events.CallFailed(calls.now(), service, "recovery", str(error)))
                return
            absence.since_s = calls.now()  # it may come back at any time
        else:
            calls.emit(events.ServiceBack(calls.now(), service))
            return


async def _healthy_again(calls: Calls, command: commands.AwaitService, absence: Absence) -> None:
    """Raises what keeps the peer from being healthy in time."""
    service, limit_s = command.service, calls.config.service_recovery_s
    left_s = absence.since_s + limit_s - calls.now()
    if left_s <= 0:
        raise Unavailable(f"{service} kept failing{absence.why}", seen=f"{limit_s:g} s")
    # Healthy is not yet able: a peer whose own peers are away answers, and fails at once.
    await asyncio.sleep(min(absence.pause_s, left_s))
    absence.pause_s = min(2 * absence.pause_s, _LONGEST_PAUSE_S)
    try:
        await calls.peers.wait_healthy(service, left_s)
    except PacelineError:
        if not await _gets_on(calls, service, limit_s):
            raise
        absence.since_s = calls.now()  # it loads or replays: its time begins anew
        await _healthy_again(calls, command, absence)


async def _gets_on(calls: Calls, service: Service, limit_s: float) -> bool:
    """Whether a service that is not healthy answers, and a part of it has made progress."""
    try:
        parts = (await ask_progress(calls.peers.channels[service], patient(ASK_S))).parts
    except PacelineError:
        return False
    return any(part.still_s < limit_s for part in parts if part.doing)
