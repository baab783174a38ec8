"""Implements `paceline pause` and `resume`."""

from __future__ import annotations

from rich.console import Console

from paceline.cli.access import Coordinator, asked
from paceline.cli.awaited import over, wait_until
from paceline.v1 import coordinator_pb2 as pb


async def pause_run(coordinator: Coordinator, console: Console) -> int:
    """Pauses a run and prints its remaining work; returns 0, or 1 if it does not pause.

    Raises Unavailable if no coordinator responds. Raises FailedPrecondition if no run is active or
    all its steps have begun. A cancelled call ends the wait, but the run still pauses.
    """
    async with asked(coordinator, "PauseRun", pb.PauseRunRequest()) as (stub, answer):
        console.print(f"the run pauses after {answer.steps} steps", highlight=False)
        left = "the coordinator has left; the next one of the run pauses it", 1
        return await wait_until(stub, console, _rests, left, "the run still pauses")


async def resume_run(coordinator: Coordinator, console: Console) -> int:
    """Resumes a run and prints whether it was paused; returns 0. Raises as `pause_run`."""
    async with asked(coordinator, "ResumeRun", pb.ResumeRunRequest()) as (_, answer):
        told = "the run goes on" if answer.was_paused else "the run goes on: it was not paused"
        console.print(told, highlight=False)
        return 0


def _rests(snapshot: pb.GetSnapshotResponse) -> tuple[str, int] | None:
    if snapshot.phase == "paused":
        told = f"the run is paused after {snapshot.step} steps, of {snapshot.total_steps}"
        return f"{told}; to go on: paceline resume", 0
    if (ended := over(snapshot)) is not None:
        return ended[0], 1
    return None if snapshot.paused else ("the run is not paused any more", 1)
