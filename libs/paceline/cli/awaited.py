"""Waits for a run to reach a state and prints its current work meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape

from paceline.cli.access import DEADLINE_S
from paceline.errors import Unavailable
from paceline.rpc import rpc_errors
from paceline.v1 import coordinator_pb2 as pb

_ASK_AGAIN_S = 0.2
_WAITS_FOR = {
    "ready": "step {step} to begin",
    "paused": "the paused run to go on to its end",
    "evaluate": "an evaluation after {step} steps",
    "closing": "the trainers' checkpoints",
}

Ends = Callable[[pb.GetSnapshotResponse], tuple[str, int] | None]
"""Checks a snapshot: None to wait on, or the text to print and the exit status."""


def over(snapshot: pb.GetSnapshotResponse) -> tuple[str, int] | None:
    """Ends the wait if the run has ended: status 0, or 1 if it failed."""
    if snapshot.phase == "failed":
        return f"[bold red]the run failed:[/] {escape(snapshot.failure)}", 1
    if snapshot.phase == "finished":
        return f"the run has ended after {snapshot.step} steps", 0
    return None


async def wait_until(
    stub: Any, console: Console, ends: Ends, left: tuple[str, int], if_cancelled: str
) -> int:
    """Prints the run's current work at each change and returns the exit status.

    `left`: result if no coordinator responds, as for `ends`. `if_cancelled`: text on work that
    continues after a cancelled wait.
    """
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
