"""`paceline stop`: ends a run with the step that runs, and waits until it has ended."""

from __future__ import annotations

import asyncio
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
    "evaluate": "an evaluation after {step} steps",
    "closing": "the trainers' checkpoints",
}


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
        try:
            return await _wait(stub, console)
        except asyncio.CancelledError:
            console.print("not waiting any longer; the run still ends", highlight=False)
            raise


async def _wait(stub: Any, console: Console) -> int:
    told = ""
    while True:
        try:
            with rpc_errors():
                snapshot = await stub.GetSnapshot(pb.GetSnapshotRequest(), timeout=DEADLINE_S)
        except Unavailable:
            console.print("the coordinator has left", highlight=False)
            return 0
        if snapshot.phase == "failed":
            console.print(
                f"[bold red]the run failed:[/] {escape(snapshot.failure)}", highlight=False
            )
            return 1
        if snapshot.phase == "finished":
            console.print(f"the run has ended after {snapshot.step} steps", highlight=False)
            return 0
        step_phase = f"step {{step}}: {snapshot.phase}"
        waits_for = _WAITS_FOR.get(snapshot.phase, step_phase).format(step=snapshot.step)
        if waits_for != told:
            console.print(f"waiting for {waits_for}", highlight=False)
            told = waits_for
        await asyncio.sleep(_ASK_AGAIN_S)
