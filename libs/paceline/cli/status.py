"""Reads the current work of an active run, for `paceline status`, `doctor RUN` and the live page.

The coordinator is the source: its snapshot and the parts of all services. Beside it there are only
the pushed sets of the gateway and the lengths of the streams.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

import grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.cli.access import DEADLINE_S, Coordinator, coordinator_answers, coordinator_at
from paceline.cli.choice import drafter_line
from paceline.cli.live import away_line, step_line
from paceline.cli.watch import enum_word
from paceline.config import ServiceConfig
from paceline.errors import PacelineError
from paceline.local.redis import resolved
from paceline.messages import versions_from_proto
from paceline.rpc import channel, rpc_errors
from paceline.rpc.progress import ask_progress
from paceline.streams import RedisStream, connect, run_key
from paceline.v1 import coordinator_pb2 as pb
from paceline.v1.progress_pb2 import GetProgressResponse, Part
from paceline.v1.weights_pb2 import GetVersionsRequest
from paceline.v1.weights_pb2_grpc import WeightServiceStub

EXIT_ALARM = 1
_ANSWER_S = 10.0
"""Seconds to wait: the coordinator queries the other services before it replies."""
_MIB = 1 << 20


class Overview(NamedTuple):
    """The coordinator's view of a run."""

    snapshot: pb.GetSnapshotResponse
    progress: GetProgressResponse


async def read_overview(connection: grpc.aio.Channel) -> Overview:
    """The state of a run and the work of its services. Raises Unavailable without a reply."""
    with rpc_errors():
        snapshot = await coordinator_at(connection).GetSnapshot(
            pb.GetSnapshotRequest(), timeout=DEADLINE_S
        )
    return Overview(snapshot, await ask_progress(connection, _ANSWER_S))


async def show_status(coordinator: Coordinator, console: Console) -> int:
    """Prints phase, slots, versions and the last step; returns 1 after a failure, else 0. Raises
    Unavailable if no coordinator responds.
    """

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    async with coordinator.channel() as connection:
        with coordinator_answers(coordinator):
            snapshot, progress = await read_overview(connection)
    console.print(
        f"run [bold]{escape(snapshot.run_id)}[/]  step {snapshot.step} of {snapshot.total_steps}  "
        f"phase [bold]{snapshot.phase}[/]  "
        f"serving {versions_from_proto(snapshot.versions)} (set {snapshot.versions.seq})"
    )
    if snapshot.paused:
        when = "" if snapshot.phase == "paused" else " after the steps in progress"
        line(f"paused{when}; to continue: paceline resume")
    if snapshot.drafters.HasField("chosen") or snapshot.drafters.HasField("promoted"):
        line(drafter_line(snapshot.drafters))
    console.print(_slots_table(snapshot.slots))
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
    async with coordinator.channel() as connection:
        with coordinator_answers(coordinator):
            progress = await ask_progress(connection, _ANSWER_S)
    if as_json:
        print(json.dumps(MessageToDict(progress, preserving_proto_field_name=True), indent=2))
    else:
        console.print(_parts_table(progress.parts))
        alarm = f"[bold red]{escape(progress.alarm)}[/]" if progress.alarm else "[green]no alarm[/]"
        console.print(alarm, highlight=False, soft_wrap=True)
    return EXIT_ALARM if progress.alarm else 0


async def read_figures(config: ServiceConfig) -> dict[str, str]:
    """Queue lengths and versions of a run as text, by name, without unreachable services."""

    async def found(read: Callable[[ServiceConfig], Awaitable[dict[str, str]]]) -> dict[str, str]:
        try:
            async with asyncio.timeout(DEADLINE_S):  # Redis retries for longer
                return await read(config)
        except (PacelineError, TimeoutError):
            return {}  # the service restarts or has ended

    requests, pushed, streams = await asyncio.gather(*map(found, (_requests, _pushed, _streams)))
    return requests | pushed | streams


async def _requests(config: ServiceConfig) -> dict[str, str]:
    async with channel(config.addresses.coordinator, config.security) as connection:
        snapshot, progress = await read_overview(connection)
    promoted = snapshot.drafters.promoted if snapshot.drafters.HasField("promoted") else None
    figures = {
        "serving": str(versions_from_proto(snapshot.versions)),
        "promoted": "none" if promoted is None else f"d{promoted}",
    }
    for counts in (part.counts for part in progress.parts if part.name == "gateway"):
        for name in ("requests_running", "requests_waiting", "open_sessions"):
            figures[name.replace("_", " ")] = str(counts[name])
        figures["unsent"] = f"{counts['unsent_bytes'] / _MIB:.1f} MiB"
    return figures


async def _pushed(config: ServiceConfig) -> dict[str, str]:
    """The prepared versions that all gateways have."""

    async def versions_at(address: str) -> list[str]:
        async with channel(address, config.security) as connection:
            weights = WeightServiceStub(connection)  # type: ignore[no-untyped-call]
            with rpc_errors():
                known = await weights.GetVersions(GetVersionsRequest(), timeout=DEADLINE_S)
        kinds = (("p", known.prepared_policy), ("d", known.prepared_drafter))
        return [f"{letter}{version}" for letter, versions in kinds for version in versions]

    first, *rest = await asyncio.gather(*map(versions_at, config.addresses.gateways))
    pushed = [one for one in first if all(one in versions for versions in rest)]
    return {"pushed": ", ".join(pushed) or "none"}


async def _streams(config: ServiceConfig) -> dict[str, str]:
    urls, found = resolved(config).redis, {}
    for name, url in (("trajectories", urls.durable_url), ("features", urls.features)):
        client = connect(url)
        stream = RedisStream(client, run_key(config.run.id, name))
        try:
            depth = await stream.depth()
        finally:
            await stream.close()
            await client.aclose()
        found[name] = f"{depth.entries} entries, {depth.bytes / _MIB:.1f} MiB"
    return found


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
