"""Implements `paceline stop`: ends a run after the current step and waits for the end."""

from __future__ import annotations

from rich.console import Console

from paceline.cli.access import Coordinator, asked
from paceline.cli.awaited import over, wait_until
from paceline.v1 import coordinator_pb2 as pb


async def stop_run(coordinator: Coordinator, console: Console) -> int:
    """Prints the run's remaining work until it has ended; returns 0, or 1 if it failed meanwhile.

    Raises Unavailable if no coordinator responds. Raises FailedPrecondition if the run has not
    begun or has ended. A cancelled call ends the wait, but the run still ends.
    """
    async with asked(coordinator, "StopRun", pb.StopRunRequest()) as (stub, answer):
        console.print(f"the run ends with {answer.total_steps} steps", highlight=False)
        left = "the coordinator has left", 0
        return await wait_until(stub, console, over, left, "the run still ends")
