"""Listeners get notices of callers that wait for lent workers; the workers' return ends them."""

from __future__ import annotations

import asyncio

import pytest

from paceline.local.patience import patient
from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.services.rollout_gateway.workers.placement import Seat, WaitingRequests
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb

AFTER_S = 0.05


@pytest.mark.parametrize("back", [False, True], ids=["lent all the time", "back in time"])
async def test_callers_are_told_of_while_the_worker_that_they_wait_for_is_lent(back: bool) -> None:
    seats = [Seat(0), Seat(1, released=True)]
    traffic = WaitingRequests(seats, 60.0, at_once=1, after_s=AFTER_S)
    for number in (1, 2, 3):
        seats[0].add(Generation(pb.EngineRequest(request_id=number), None))
    traffic.update()
    seats[1].released = not back  # no request has changed by it
    told = traffic.reports()
    first = asyncio.ensure_future(anext(told))
    done, _ = await asyncio.wait({first}, timeout=4 * AFTER_S if back else patient(10))
    assert bool(done) is not back
    traffic.stop()
    if done:
        assert first.result() == rpb.WatchTrafficResponse(requests=2, workers=[1])
    else:
        with pytest.raises(StopAsyncIteration):
            await first
