"""Claims a task of the run for an agent, from any replica that offers one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from paceline.errors import PacelineError, Unavailable
from paceline.services.rollout_gateway.replicas.fleet import Replica
from paceline.services.rollout_gateway.replicas.routing import SessionRouting

SLICE_S = 0.25
"""Maximum wait of a claim at one replica, seconds. Another replica may get a task meanwhile."""
T = TypeVar("T")


async def claim_in_turn(
    routing: SessionRouting,
    wait_s: float,
    at: Callable[[Replica, float], Awaitable[T | None]],
    refusal: Callable[[PacelineError], bool],
) -> T | None:
    """Returns the first task that a replica offers; None if no replica offers one within the wait.

    `at` claims at a replica, with a wait in seconds. `refusal` returns True for an error of a
    replica that will never offer a task.

    Raises a refusal when every available replica refuses, and any other error of a claim.
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
                continue  # a lost replica offers its tasks again after its restart
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
