"""Implements `paceline doctor`: checks the machine before a run, and checks an active run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.cli.access import Coordinator
from paceline.cli.machine_checks import findings
from paceline.config import ServiceConfig, load_config
from paceline.errors import Unavailable
from paceline.local.findings import Finding
from paceline.rpc.progress import ask_progress
from paceline.v1.progress_pb2 import GetProgressResponse, Part

EXIT_FAIL = 1
_ANSWER_S = 10.0
"""Seconds to wait: the coordinator queries the other services before it replies."""
_MARKS = {"ok": "[green]ok  [/]", "warn": "[bold yellow]warn[/]", "fail": "[bold red]fail[/]"}
_NAME_WIDTH = 26


async def check_machine(
    files: Sequence[Path], overrides: Sequence[str], console: Console, *, as_json: bool
) -> int:
    """Prints the machine's findings for a run with these settings; returns 0, or 1 after a failed
    check.

    Raises ConfigError if the settings cannot be read.
    """
    config = load_config(ServiceConfig, "local", files, overrides)
    found: list[Finding] = []
    async for finding in findings(config, [path.absolute() for path in files], overrides):
        found.append(finding)
        if not as_json:
            console.print(finding_line(finding), highlight=False, soft_wrap=True)
    failed = sum(one.verdict == "fail" for one in found)
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        told = f"[bold red]{failed} fail[/]: a run would not start" if failed else "nothing fails"
        console.print(told, highlight=False)
    return EXIT_FAIL if failed else 0


async def check_run(coordinator: Coordinator, console: Console, *, as_json: bool) -> int:
    """Prints the work, the blockers and the alarm of a run's services; returns 0, or 1 under alarm.

    Raises Unavailable if no coordinator responds.
    """
    async with coordinator.channel() as connection:
        try:
            progress = await ask_progress(connection, _ANSWER_S)
        except Unavailable as error:
            raise Unavailable("no coordinator answers", seen=coordinator.address) from error
    if as_json:
        print(json.dumps(MessageToDict(progress, preserving_proto_field_name=True), indent=2))
    else:
        _show(progress, console)
    return EXIT_FAIL if progress.alarm else 0


def _show(progress: GetProgressResponse, console: Console) -> None:
    table = Table("", "does", "for", "last progress", "waits for", "counts", "last span")
    for part in progress.parts:
        table.add_row(
            f"[bold]{escape(part.name)}[/]",
            f"[bold red]{escape(part.trouble)}[/]" if part.trouble else escape(part.doing),
            f"{part.doing_s:.1f} s" if part.doing else "",
            f"{part.still_s:.1f} s ago" if part.doing else "",
            escape(part.waits_for),
            counts_text(part),
            f"{escape(part.last_span)}, {part.last_span_s:.1f} s ago" if part.last_span else "",
        )
    console.print(table)
    told = f"[bold red]{escape(progress.alarm)}[/]" if progress.alarm else "[green]no alarm[/]"
    console.print(told, highlight=False, soft_wrap=True)


def counts_text(part: Part) -> str:
    """The counts that are not zero, as text."""
    named = sorted((name.replace("_", " "), count) for name, count in part.counts.items() if count)
    return ", ".join(f"{name} {count:,}" for name, count in named)


def finding_line(finding: Finding) -> str:
    """A finding as a line with rich markup; the advice is on the next line."""
    line = f"{_MARKS[finding.verdict]} {finding.check:<{_NAME_WIDTH}} {escape(finding.seen)}"
    if finding.verdict == "ok" or not finding.advice:
        return line
    return f"{line}\n{'':{_NAME_WIDTH + 5}} [bold]->[/] {escape(finding.advice)}"
