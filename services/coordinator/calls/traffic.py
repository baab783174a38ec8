"""Subscribes to the gateway's traffic during the run, and reclaims slots for waiting callers. The
subscription also keeps the leases alive.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from paceline.errors import PacelineError
from paceline.rpc import responses, rpc_errors
from paceline.services.coordinator.calls.base import Calls
from paceline.services.coordinator.calls.slots import give_back
from paceline.services.coordinator.machine import events
from paceline.telemetry import get_logger
from paceline.v1 import rollout_pb2

_PAUSE_S = 1.0
"""Seconds between two calls, so that a gateway that rejects calls is not flooded."""


async def listen(calls: Calls) -> None:
    """Subscribes for ever, across restarts of the gateway."""
    while True:
        try:
            await _listen(calls)
        except PacelineError as error:
            get_logger("coordinator").debug("the gateway is not heard", error=str(error))
        await asyncio.sleep(_PAUSE_S)


async def _listen(calls: Calls) -> None:
    request = rollout_pb2.WatchTrafficRequest()
    with rpc_errors():
        call = calls.peers.rollout.WatchTraffic(request, wait_for_ready=True)
        async with aclosing(responses(call)) as news:
            async for waiting in news:
                await _reclaim(calls, waiting)


async def _reclaim(calls: Calls, waiting: rollout_pb2.WatchTrafficResponse) -> None:
    """Serves callers that wait for lent workers: ends the drafter's lease, or resumes workers
    without a holder at once.
    """
    state = calls.state()
    if state.lease is None:
        await give_back(calls, state.step, waiting.epoch)
    elif state.lease.epoch == waiting.epoch:
        calls.emit(events.TrafficWaits(calls.now(), waiting.epoch, waiting.requests))
