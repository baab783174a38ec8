"""Waits for services that are away."""

from __future__ import annotations

import asyncio

from coordinator.calls.base import Absence, Calls
from coordinator.machine import commands, events
from paceline.errors import PacelineError, Unavailable

_LONGEST_PAUSE_S = 5.0


async def await_service(calls: Calls, command: commands.AwaitService) -> None:
    """Emits ServiceBack when the peer is healthy again, CallFailed when it fails for too long."""
    service, limit_s = command.service, calls.config.service_recovery_s
    absence = calls.absent.setdefault(service, Absence(calls.now()))
    left_s = absence.since_s + limit_s - calls.now()
    try:
        if left_s <= 0:
            raise Unavailable(f"{service} kept failing", seen=f"{limit_s:g} s")
        # Healthy is not yet able: a peer whose own peers are away answers, and fails at once.
        await asyncio.sleep(min(absence.pause_s, left_s))
        absence.pause_s = min(2 * absence.pause_s, _LONGEST_PAUSE_S)
        await calls.peers.wait_healthy(service, left_s)
    except PacelineError as error:
        calls.emit(events.CallFailed(calls.now(), service, "recovery", str(error)))
        return
    calls.emit(events.ServiceBack(calls.now(), service))
