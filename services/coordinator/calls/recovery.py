"""Waits until unavailable services are healthy again."""

import asyncio
from typing import Any

from paceline.errors import PacelineError, Unavailable
from paceline.local.patience import patient
from paceline.rpc.progress import ASK_S, ask_progress
from paceline.services.coordinator.calls.base import Absence, Calls, each
from paceline.services.coordinator.machine import commands, events
from paceline.services.coordinator.machine.state import OPTIONAL

_LONGEST_PAUSE_S = 5.0


async def await_service(calls: Calls, command: commands.AwaitService) -> None:
    """Emits ServiceBack when the peer is healthy again. Emits CallFailed when a required peer does
    not recover in time.
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
            absence.since_s = calls.now()  # an optional service may return at any time
        else:
            calls.emit(events.ServiceBack(calls.now(), service))
            return


async def _healthy_again(calls: Calls, command: commands.AwaitService, absence: Absence) -> None:
    """Returns when the peer is healthy. Raises the last error when the recovery time is over."""
    service, limit_s = command.service, calls.config.service_recovery_s
    left_s = absence.since_s + limit_s - calls.now()
    if left_s <= 0:
        raise Unavailable(f"{service} kept failing{absence.why}", seen=f"{limit_s:g} s")
    # A healthy peer may still fail: if its own peers are away, its calls fail at once. Hence the
    # pause.
    await asyncio.sleep(min(absence.pause_s, left_s))
    absence.pause_s = min(2 * absence.pause_s, _LONGEST_PAUSE_S)
    if late := await calls.peers.unhealthy(service, left_s):
        channels = calls.peers.channels[service]
        if not all(await each(_gets_on(channels[number], limit_s) for number in late)):
            raise next(iter(late.values()))
        absence.since_s = calls.now()  # it loads or replays, so its time starts again
        await _healthy_again(calls, command, absence)


async def _gets_on(channel: Any, limit_s: float) -> bool:
    """Whether an unhealthy process still answers and one of its parts has made progress."""
    try:
        parts = (await ask_progress(channel, patient(ASK_S))).parts
    except PacelineError:
        return False
    return any(part.still_s < limit_s for part in parts if part.doing)
