"""`paceline stop`, `pause` and `resume`: ends a run with the step that runs, or has it rest after
that, waits until it does, and lets it go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape

from paceline.cli.access import Coordinator, coordinator_answers
from paceline.errors import Unavailable
from paceline.rpc import rpc_errors
from paceline.v1 import coordinator_pb2 as pb
from paceline.v1.coordinator_pb2_grpc import CoordinatorServiceStub

DEADLINE_S = 5.0
_ASK_AGAIN_S = 0.2
_WAITS_FOR = {
    "ready": "step {step} to begin",
    "paused": "the paused run to go on to its end",
    "evaluate": "an evaluation after {step} steps",
    "closing": "the trainers' checkpoints",
}

Ends = Callable[[pb.GetSnapshotResponse], tuple[str, int] | None]
"""What to print, and the exit status, when a snapshot ends the waiting."""


async def stop_run(coordinator: Coordinator, console: Console) -> int:
    """Prints what the run still does until it has ended: 0, or 1 when it failed meanwhile.

    Raises Unavailable when no coordinator answers, FailedPrecondition when its run has not begun or
    is over. Whoever is cancelled waits no longer; the run ends all the same.
    """
    async with coordinator.channel() as connection:
        stub = CoordinatorServiceStub(connection)  # type: ignore[no-untyped-call]
        with coordinator_answers(coordinator):
            answer = await stub.StopRun(pb.StopRunRequest(), timeout=DEADLINE_S)
        console.print(f"the run ends with {answer.total_steps} steps", highlight=False)
        left = "the coordinator has left", 0
        return await _wait(stub, console, _over, left, "the run still ends")


async def pause_run(coordinator: Coordinator, console: Console) -> int:
    """Prints what the run still does until it rests: 0, or 1 when it does not come to that.

    Raises as `stop_run` does, and FailedPrecondition when all steps have begun. Whoever is
    cancelled waits no longer; the run pauses all the same.
    """
    async with coordinator.channel() as connection:
        stub = CoordinatorServiceStub(connection)  # type: ignore[no-untyped-call]
        with coordinator_answers(coordinator):
            answer = await stub.PauseRun(pb.PauseRunRequest(), timeout=DEADLINE_S)
        console.print(f"the run pauses after {answer.steps} steps", highlight=False)
        left = "the coordinator has left; the next one of the run pauses it", 1
        return await _wait(stub, console, _rests, left, "the run still pauses")


async def resume_run(coordinator: Coordinator, console: Console) -> int:
    """Prints whether the run had been paused; 0. Raises as `stop_run` does."""
    async with coordinator.channel() as connection:
        stub = CoordinatorServiceStub(connection)  # type: ignore[no-untyped-call]
        with coordinator_answers(coordinator):
            answer = await stub.ResumeRun(pb.ResumeRunRequest(), timeout=DEADLINE_S)
    told = "the run goes on" if answer.was_paused else "the run goes on: it was not paused"
    console.print(told, highlight=False)
    return 0


def _over(snapshot: pb.GetSnapshotResponse) -> tuple[str, int] | None:
    if snapshot.phase == "failed":
        return f"[bold red]the run failed:[/] {escape(snapshot.failure)}", 1
    if snapshot.phase == "finished":
        return f"the run has ended after {snapshot.step} steps", 0
    return None


def _rests(snapshot: pb.GetSnapshotResponse) -> tuple[str, int] | None:
    if snapshot.phase == "paused":
        told = f"the run is paused after {snapshot.step} steps, of {snapshot.total_steps}"
        return f"{told}; to go on: paceline resume", 0
    if (over := _over(snapshot)) is not None:
        return over[0], 1
    return None if snapshot.paused else ("the run is not paused any more", 1)


async def _wait(
    stub: Any, console: Console, ends: Ends, left: tuple[str, int], if_cancelled: str
) -> int:
    """Prints what the run waits for at each change; `left`: when no coordinator answers."""
    try:
        return await _told(stub, console, ends, left)
    except asyncio.CancelledError:
        console.print(f"not waiting any longer; {if_cancelled}", highlight=False)
        raise


async def _told(stub: Any, console: Console, ends: Ends, left: tuple[str, int]) -> int:
    told = ""
    while True:
        try:
            with rpc_errors():
                snapshot = await stub.GetSnapshot(pb.GetSnapshotRequest(), timeout=DEADLINE_S)
            text, status = ends(snapshot) or ("", None)
        except Unavailable:
            text, status = left
        if status is not None:
            console.print(text, highlight=False)
            return status
        step_phase = f"step {{step}}: {snapshot.phase}"
        waits_for = _WAITS_FOR.get(snapshot.phase, step_phase).format(step=snapshot.step)
        if waits_for != told:
            console.print(f"waiting for {waits_for}", highlight=False)
            told = waits_for
        await asyncio.sleep(_ASK_AGAIN_S)
