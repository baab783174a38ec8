"""Prints the state of an active run: `paceline status`."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.cli.access import DEADLINE_S, Coordinator, coordinator_answers
from paceline.cli.choice import drafter_line
from paceline.cli.doctor import counts_text
from paceline.cli.live import away_line, step_line
from paceline.cli.watch import enum_word
from paceline.messages import versions_from_proto
from paceline.rpc.progress import ask_progress
from paceline.v1 import coordinator_pb2 as pb
from paceline.v1.coordinator_pb2_grpc import CoordinatorServiceStub


async def show_status(coordinator: Coordinator, console: Console) -> int:
    """Prints phase, slots, versions and the last step; returns 1 after a failure, else 0. Raises
    Unavailable if no coordinator responds.
    """
    async with coordinator.channel() as connection:
        stub = CoordinatorServiceStub(connection)  # type: ignore[no-untyped-call]
        with coordinator_answers(coordinator):
            snapshot = await stub.GetSnapshot(pb.GetSnapshotRequest(), timeout=DEADLINE_S)
            progress = await ask_progress(connection, DEADLINE_S)

    console.print(
        f"run [bold]{escape(snapshot.run_id)}[/]  step {snapshot.step} of {snapshot.total_steps}  "
        f"phase [bold]{snapshot.phase}[/]  "
        f"serving {versions_from_proto(snapshot.versions)} (set {snapshot.versions.seq})"
    )
    if snapshot.paused:
        when = "" if snapshot.phase == "paused" else " when what is under way has ended"
        console.print(f"paused{when}; to go on: paceline resume", highlight=False, soft_wrap=True)
    if snapshot.drafters.HasField("chosen") or snapshot.drafters.HasField("promoted"):
        console.print(drafter_line(snapshot.drafters), highlight=False, soft_wrap=True)
    console.print(_slots_table(snapshot.slots))
    for part in progress.parts[1:]:  # the first part is shown above
        if counts := counts_text(part):
            console.print(f"{part.name}: {counts}", highlight=False, soft_wrap=True)
    if progress.alarm:
        console.print(f"[bold red]{escape(progress.alarm)}[/]", highlight=False, soft_wrap=True)
    if snapshot.last_step.step_s:
        line = step_line(snapshot.last_step, snapshot.total_steps)
        console.print(f"last: {line}", highlight=False, soft_wrap=True)
    if snapshot.samples_unscored:
        unscored = sorted(snapshot.samples_unscored.items())
        ways = ", ".join(f"{count} {way}" for way, count in unscored)
        console.print(f"samples without a reward: {ways}", highlight=False, soft_wrap=True)
    if snapshot.away:
        console.print(away_line(snapshot.away), highlight=False)
    if snapshot.failure:
        console.print(f"[bold red]{escape(snapshot.failure)}[/]", highlight=False)
        return 1
    return 0


def _slots_table(ranges: Iterable[pb.SlotRange]) -> Table:
    slots = Table("slots", "holder", "epoch", "worker")
    for some in ranges:
        last = some.first + some.count - 1
        slots.add_row(
            str(last) if some.count == 1 else f"{some.first}-{last}",
            enum_word(pb.Holder, some.holder),
            str(some.epoch),
            enum_word(pb.WorkerState, some.worker_state),
        )
    return slots
