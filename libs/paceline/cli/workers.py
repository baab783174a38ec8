"""`paceline add-workers` and `drain-workers`: workers join a run that goes on, and leave it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from paceline.cli.access import Coordinator, asked
from paceline.cli.awaited import Ends, over, wait_until
from paceline.v1 import coordinator_pb2 as pb


async def add_workers(coordinator: Coordinator, count: int, console: Console) -> int:
    """Prints which workers join and when they are there: 0, or 1 when they do not come.

    Raises Unavailable when no coordinator answers, FailedPrecondition when no run goes on or there
    is no place for so many. Whoever is cancelled waits no longer; the workers join all the same.
    """
    request = pb.RequestWorkersRequest(count=count)
    async with asked(coordinator, "RequestWorkers", request) as (stub, answer):
        wanted = list(answer.workers)
        console.print(f"{_named(wanted)} to join", highlight=False)
        left = "the coordinator has left; the next one of the run goes on with it", 1
        return await wait_until(stub, console, _there(wanted), left, "they still join")


async def drain_workers(
    coordinator: Coordinator, workers: Sequence[int], drain_s: float, console: Console
) -> int:
    """Prints which workers leave and when they are gone: 0, or 1 when the run ends before.

    Raises as `add_workers` does, also for a worker that is not there, and where none would be left.
    Whoever is cancelled waits no longer; the workers leave all the same.
    """
    request = pb.RequestDrainRequest(workers=workers, drain_s=drain_s)
    async with asked(coordinator, "RequestDrain", request) as (stub, answer):
        console.print(
            f"{_named(workers)} to leave; {_named(answer.staying)} to stay", highlight=False
        )
        left = "the coordinator has left; the next one of the run goes on with it", 1
        return await wait_until(stub, console, _gone(workers), left, "they still leave")


def _there(wanted: Sequence[int]) -> Ends:
    def ends(snapshot: pb.GetSnapshotResponse) -> tuple[str, int] | None:
        if {*wanted} <= {*snapshot.workers}:
            return f"{_named(wanted)} there, with a share of the next tasks", 0
        if (ended := over(snapshot)) is not None:
            return ended[0], 1
        if {*wanted} & {*snapshot.joining}:
            return None
        failed = [one for one in wanted if one not in snapshot.workers]
        return f"{_named(failed)} not started; the reason is in RUN/logs/gateway.log", 1

    return ends


def _gone(wanted: Sequence[int]) -> Ends:
    def ends(snapshot: pb.GetSnapshotResponse) -> tuple[str, int] | None:
        if not {*wanted} & {*snapshot.workers}:
            return f"{_named(wanted)} gone", 0
        ended = over(snapshot)
        return None if ended is None else (ended[0], 1)

    return ends


def _named(workers: Iterable[int]) -> str:
    numbers = sorted(set(workers))
    return f"worker{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers))}"
