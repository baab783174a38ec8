"""Subscribes to the gateway's traffic during the run, and reclaims slots for waiting callers. The
subscription also keeps the leases alive.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

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
    """Subscribes to all gateways for ever, across their restarts."""
    await asyncio.gather(*(_listen_on(calls, one) for one in calls.peers.rollouts))


async def _listen_on(calls: Calls, rollout: Any) -> None:
    while True:
        try:
            await _listen(calls, rollout)
        except PacelineError as error:
            get_logger("coordinator").debug("the gateway is not heard", error=str(error))
        await asyncio.sleep(_PAUSE_S)


async def _listen(calls: Calls, rollout: Any) -> None:
    request = rollout_pb2.WatchTrafficRequest()
    with rpc_errors():
        call = rollout.WatchTraffic(request, wait_for_ready=True)
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
