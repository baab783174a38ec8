"""Prints the state of an active run, and sends an operator's requests: stop, pause, resume.

The coordinator is the source: its snapshot and the parts of all services. Beside it there are only
the pushed sets of the gateway and the lengths of the streams.
"""

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.cli.access import DEADLINE_S, Coordinator, opened
from paceline.cli.live import away_line, enum_word, step_line
from paceline.config import ServiceConfig
from paceline.errors import PacelineError, Unavailable
from paceline.messages import versions_from_proto
from paceline.rpc import rpc_errors
from paceline.rpc.progress import ask_progress, chain_text, wait_chain
from paceline.v1 import coordinator_pb2 as pb
from paceline.v1.progress_pb2 import GetProgressResponse, Part

_ASK_AGAIN_S = 0.2
_WAITS_FOR = {
    "ready": "step {step} to begin",
    "paused": "the paused run to go on to its end",
    "evaluate": "an evaluation after {step} steps",
    "closing": "the trainers' checkpoints",
}

Ends = Callable[[pb.GetSnapshotResponse], tuple[str, int] | None]
"""Checks a snapshot: None to wait on, or the text to print and the exit status."""


def _find_end(snapshot: pb.GetSnapshotResponse) -> tuple[str, int] | None:
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
    shown = ""
    try:
        while True:
            try:
                with rpc_errors():
                    snapshot = await stub.GetSnapshot(pb.GetSnapshotRequest(), timeout=DEADLINE_S)
                end = ends(snapshot)
            except Unavailable:
                end = left
            if end is not None:
                console.print(end[0], highlight=False)
                return end[1]
            step_phase = f"step {{step}}: {snapshot.phase}"
            waits_for = _WAITS_FOR.get(snapshot.phase, step_phase).format(step=snapshot.step)
            if waits_for != shown:
                console.print(f"waiting for {waits_for}", highlight=False)
                shown = waits_for
            await asyncio.sleep(_ASK_AGAIN_S)
    except asyncio.CancelledError:
        console.print(f"not waiting any longer; {if_cancelled}", highlight=False)
        raise


async def pause_run(coordinator: Coordinator, console: Console) -> int:
    """Prints the remaining work until the run is paused. Returns 0, or 1 if the run does not pause.

    Raises Unavailable when no coordinator answers, FailedPrecondition when no run is active or all
    its steps have begun. A cancelled caller stops waiting; the run pauses nevertheless.
    """
    async with opened(coordinator) as (_, stub):
        answer = await stub.PauseRun(pb.PauseRunRequest(), timeout=DEADLINE_S)
        console.print(f"the run pauses after {answer.steps} steps", highlight=False)
        left = "the coordinator has left; the next one of the run pauses it", 1
        return await wait_until(stub, console, _find_pause, left, "the run still pauses")


async def resume_run(coordinator: Coordinator, console: Console) -> int:
    """Prints whether the run had been paused; 0. Raises as `pause_run` does."""
    async with opened(coordinator) as (_, stub):
        answer = await stub.ResumeRun(pb.ResumeRunRequest(), timeout=DEADLINE_S)
    text = "the run continues" if answer.was_paused else "the run was not paused and continues"
    console.print(text, highlight=False)
    return 0


def _find_pause(snapshot: pb.GetSnapshotResponse) -> tuple[str, int] | None:
    if snapshot.phase == "paused":
        text = f"the run is paused after {snapshot.step} steps, of {snapshot.total_steps}"
        return f"{text}; to continue: paceline resume", 0
    if (ended := _find_end(snapshot)) is not None:
        return ended[0], 1
    return None if snapshot.paused else ("the run is not paused any more", 1)


async def stop_run(coordinator: Coordinator, console: Console) -> int:
    """Prints the remaining work until the run has ended. Returns 0, or 1 if the run failed.

    Raises Unavailable when no coordinator answers, FailedPrecondition when its run has not begun or
    is over. A cancelled caller stops waiting; the run ends nevertheless.
    """
    async with opened(coordinator) as (_, stub):
        answer = await stub.StopRun(pb.StopRunRequest(), timeout=DEADLINE_S)
        console.print(f"the run ends with {answer.total_steps} steps", highlight=False)
        left = "the coordinator has left", 0
        return await wait_until(stub, console, _find_end, left, "the run still ends")


EXIT_ALARM = 1
_ANSWER_S = 10.0
"""Seconds to wait: the coordinator queries the other services before it replies."""


async def read_overview(
    coordinator: Coordinator,
) -> tuple[pb.GetSnapshotResponse, GetProgressResponse]:
    """The state of a run and the work of its services. Raises Unavailable without a reply."""
    async with opened(coordinator) as (connection, stub):
        snapshot = await stub.GetSnapshot(pb.GetSnapshotRequest(), timeout=DEADLINE_S)
        return snapshot, await ask_progress(connection, _ANSWER_S)


async def show_status(coordinator: Coordinator, console: Console) -> int:
    """Prints phase, slots, versions and the last step; returns 1 after a failure, else 0. Raises
    Unavailable if no coordinator responds.
    """

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    snapshot, progress = await read_overview(coordinator)
    console.print(
        f"run [bold]{escape(snapshot.run_id)}[/]  step {snapshot.step} of {snapshot.total_steps}  "
        f"phase [bold]{snapshot.phase}[/]  "
        f"serving {versions_from_proto(snapshot.versions)} (set {snapshot.versions.seq})"
    )
    if snapshot.paused:
        when = "" if snapshot.phase == "paused" else " after the steps in progress"
        line(f"paused{when}; to continue: paceline resume")
    if snapshot.HasField("promoted_drafter"):
        line(f"drafter d{snapshot.promoted_drafter} was promoted and waits for its commit")
    for slots in snapshot.slots:
        last = slots.first + slots.count - 1
        numbers = f"slot {last}" if slots.count == 1 else f"slots {slots.first}-{last}"
        states = enum_word(pb.Holder, slots.holder), enum_word(pb.WorkerState, slots.worker_state)
        line(f"{numbers}: held by {states[0]} in epoch {slots.epoch}, worker {states[1]}")
    for part in progress.parts[1:]:  # the first part is shown above
        if counts := _counts_text(part):
            line(f"{part.name}: {counts}")
    if progress.alarm:
        line(f"[bold red]{escape(progress.alarm)}[/]")
    if snapshot.last_step.step_s:
        line(f"last: {step_line(snapshot.last_step, snapshot.total_steps)}")
    if snapshot.samples_unscored:
        unscored = sorted(snapshot.samples_unscored.items())
        ways = ", ".join(f"{count} {way}" for way, count in unscored)
        line(f"samples without a reward: {ways}")
    if snapshot.away:
        line(away_line(snapshot.away))
    if snapshot.failure:
        line(f"[bold red]{escape(snapshot.failure)}[/]")
    return 1 if snapshot.failure else 0


async def check_run(coordinator: Coordinator, console: Console, *, as_json: bool) -> int:
    """Prints the work, the blockers and the alarm of a run's services; returns 0, or 1 under alarm.

    Raises Unavailable if no coordinator responds.
    """
    async with opened(coordinator) as (connection, _):
        progress = await ask_progress(connection, _ANSWER_S)
    if as_json:
        print(json.dumps(MessageToDict(progress, preserving_proto_field_name=True), indent=2))
    else:
        console.print(_parts_table(progress.parts))
        alarm = f"[bold red]{escape(progress.alarm)}[/]" if progress.alarm else "[green]no alarm[/]"
        console.print(alarm, highlight=False, soft_wrap=True)
    return EXIT_ALARM if progress.alarm else 0


async def read_figures(config: ServiceConfig) -> dict[str, str]:
    """Versions, queues and chain of waits of a run as text, by name; empty without a reply of its
    coordinator.
    """
    try:
        snapshot, progress = await read_overview(
            Coordinator(config.addresses.coordinator, config.security)
        )
    except PacelineError:
        return {}  # the coordinator restarts or has ended
    promoted = snapshot.promoted_drafter if snapshot.HasField("promoted_drafter") else None
    return {
        "serving": str(versions_from_proto(snapshot.versions)),
        "promoted": "none" if promoted is None else f"d{promoted}",
        **{
            part.name: text
            for part in progress.parts[1:]
            if (text := part.trouble or _counts_text(part))
        },
        "waits": chain_text(wait_chain(progress.parts, progress.parts[0].name)),
    }


def _parts_table(parts: Iterable[Part]) -> Table:
    table = Table("", "does", "for", "last progress", "waits for", "counts", "last span")
    for part in parts:
        table.add_row(
            f"[bold]{escape(part.name)}[/]",
            f"[bold red]{escape(part.trouble)}[/]" if part.trouble else escape(part.doing),
            f"{part.doing_s:.1f} s" if part.doing else "",
            f"{part.still_s:.1f} s ago" if part.doing else "",
            escape(part.waits_for),
            _counts_text(part),
            f"{escape(part.last_span)}, {part.last_span_s:.1f} s ago" if part.last_span else "",
        )
    return table


def _counts_text(part: Part) -> str:
    """The counts that are not zero, as text."""
    named = sorted((name.replace("_", " "), count) for name, count in part.counts.items() if count)
    return ", ".join(f"{name} {count:,}" for name, count in named)
