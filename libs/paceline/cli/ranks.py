"""`paceline set-ranks`: the policy of a run that goes on is trained on another number of ranks."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from paceline.cli.access import Coordinator, asked
from paceline.cli.awaited import over, wait_until
from paceline.v1 import coordinator_pb2 as pb


async def set_ranks(coordinator: Coordinator, ranks: int, console: Console) -> int:
    """Prints from which step on so many ranks train, and when they do: 0, or 1 when they do not.

    Raises Unavailable when no coordinator answers, InvalidInput and FailedPrecondition for what
    cannot be. Whoever is cancelled waits no longer; the ranks change all the same.
    """
    request = pb.RequestRanksRequest(ranks=ranks)
    async with asked(coordinator, "RequestRanks", request) as (stub, answer):
        told = f"{_named(ranks)} to train from step {answer.from_step} on"
        console.print(told, highlight=False)
        left = "the coordinator has left; the next one of the run goes on with it", 1
        return await wait_until(stub, console, _train, left, "the ranks still change")


def _train(snapshot: pb.GetSnapshotResponse) -> tuple[str, int] | None:
    if not snapshot.ranks_wanted:
        if not snapshot.ranks_failure:
            return f"the policy has {_named(snapshot.ranks)}", 0
        kept = f"the policy keeps its {_named(snapshot.ranks)}"
        return f"{kept}: {escape(snapshot.ranks_failure)}", 1
    ended = over(snapshot)
    return None if ended is None else (ended[0], 1)


def _named(ranks: int) -> str:
    return f"{ranks} rank{'s' if ranks != 1 else ''}"
