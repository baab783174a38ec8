"""Claims a task of the run for an agent from whichever replica offers one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from paceline.errors import PacelineError, Unavailable
from paceline.services.rollout_gateway.replicas.fleet import Replica
from paceline.services.rollout_gateway.replicas.routing import SessionRouting

SLICE_S = 0.25
"""For which a claim waits at one replica, while another one may get a task to offer."""
T = TypeVar("T")


async def claim_in_turn(
    routing: SessionRouting,
    wait_s: float,
    at: Callable[[Replica, float], Awaitable[T | None]],
    refusal: Callable[[PacelineError], bool],
) -> T | None:
    """The first task that a replica has; None when none had one within the wait. `at`: claims at a
    replica for so many seconds; `refusal`: an error that says that it will never offer one.

    Raises a refusal once every replica that is there refuses, and what else a claim raises.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + wait_s
    while True:
        refusals: list[PacelineError] = []
        for replica in (there := routing.in_turn()):
            left_s = end_s - loop.time()
            try:
                claimed = await at(replica, max(0.0, min(SLICE_S, left_s)))
            except Unavailable:
                continue  # lost meanwhile; its tasks are offered again when it is back
            except PacelineError as error:
                if not refusal(error):
                    raise
                refusals.append(error)
                continue
            if claimed is not None:
                return claimed
        if len(refusals) == len(there):
            raise refusals[0]
        if loop.time() >= end_s:
            return None
