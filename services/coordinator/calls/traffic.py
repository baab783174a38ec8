"""Listens to the gateway for as long as the run goes on, and takes slots back for callers that
wait. That somebody listens keeps the leases.
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
"""Between two calls: a gateway that refuses one is not asked without end."""


async def listen(calls: Calls) -> None:
    """For ever, over every restart of the gateway."""
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
    """Callers wait for lent workers: the drafter's lease ends; what nobody holds serves at once."""
    state = calls.state()
    if state.lease is None:
        await give_back(calls, state.step, waiting.epoch)
    elif state.lease.epoch == waiting.epoch:
        calls.emit(events.TrafficWaits(calls.now(), waiting.epoch, waiting.requests))
