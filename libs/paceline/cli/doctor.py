"""Checks the machine before a run: `paceline doctor`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from paceline.cli.machine_checks import findings
from paceline.config import ServiceConfig, load_config
from paceline.local.findings import Finding

EXIT_FAIL = 1
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


def finding_line(finding: Finding) -> str:
    """A finding as a line with rich markup; the advice is on the next line."""
    line = f"{_MARKS[finding.verdict]} {finding.check:<{_NAME_WIDTH}} {escape(finding.seen)}"
    if finding.verdict == "ok" or not finding.advice:
        return line
    return f"{line}\n{'':{_NAME_WIDTH + 5}} [bold]->[/] {escape(finding.advice)}"
