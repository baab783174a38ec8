"""`paceline stop`: ends a run with the step that runs, and waits until it has ended."""

from __future__ import annotations

from rich.console import Console

from paceline.cli.access import Coordinator, asked
from paceline.cli.awaited import over, wait_until
from paceline.v1 import coordinator_pb2 as pb


async def stop_run(coordinator: Coordinator, console: Console) -> int:
    """Prints what the run still does until it has ended: 0, or 1 when it failed meanwhile.

    Raises Unavailable when no coordinator answers, FailedPrecondition when its run has not begun or
    is over. Whoever is cancelled waits no longer; the run ends all the same.
    """
    async with asked(coordinator, "StopRun", pb.StopRunRequest()) as (stub, answer):
        console.print(f"the run ends with {answer.total_steps} steps", highlight=False)
        left = "the coordinator has left", 0
        return await wait_until(stub, console, over, left, "the run still ends")
