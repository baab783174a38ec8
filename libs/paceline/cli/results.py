"""Writes the results of a run: copied journal, steps, samples, summary.json and report.html."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.cli.run_files import RunFiles
from paceline.config import ServiceConfig
from paceline.local.redis import resolved
from paceline.report.audit import trespasses
from paceline.report.charts import duration
from paceline.report.html import render
from paceline.report.journal import copy_journal, read_entries, read_history, write_steps
from paceline.report.samples import newest_samples, read_samples, write_samples
from paceline.report.spans import read_report, read_spans
from paceline.report.summary import Summary, summarize
from paceline.streams import Ledger, LedgerCount, connect
from paceline.whole_files import write_whole

JOURNAL = "journal.jsonl"
STEPS = "steps.jsonl"
SAMPLES = "samples.jsonl"


async def collect(
    config: ServiceConfig, files: RunFiles, settings: Mapping[str, Any] | None = None
) -> LedgerCount:
    """Copies the journal and some samples into the run's directory, and counts its trajectories.

    Redis must be running. `settings`: settings of the run; None: from its directory. Raises
    Unavailable.
    """
    client = connect(resolved(config).redis.durable_url)
    tokenizer = _tokenizer(files.read_config() if settings is None else settings)
    try:
        await copy_journal(client, config.run.id, files.directory / JOURNAL)
        samples = await newest_samples(client, config.run.id, tokenizer)
        if samples:  # samples of finished steps leave Redis
            write_samples(files.directory / SAMPLES, samples)
        return await Ledger(client, config.run.id).count()
    finally:
        await client.aclose()


def write_results(files: RunFiles, ledger: LedgerCount, pids: Mapping[str, int]) -> Summary:
    """Writes steps.jsonl, summary.json and report.html, after all services have written their
    spans. Raises DataLoss if the run has not begun.
    """
    history, spans = read_history(files.directory / JOURNAL), read_report(files.spans)
    summary = summarize(files.run_id, history, ledger, spans, pids, files.read_config())
    entries = read_entries(files.directory / JOURNAL)
    summary["trespasses"] = trespasses(list(entries), read_spans(files.spans))
    write_steps(files.directory / STEPS, history.records)
    write_whole(files.summary, json.dumps(summary, indent=2) + "\n")
    samples = read_samples(files.directory / SAMPLES)
    write_whole(files.report, render(summary, history, spans, samples))
    return summary


def _tokenizer(settings: Mapping[str, Any]) -> Path:
    """Path of the gateway's tokenizer.json."""
    gateway = settings.get("gateway", {})
    return Path(gateway.get("tokenizer") or gateway.get("model", "")) / "tokenizer.json"


def print_results(summary: Summary, files: RunFiles, console: Console) -> None:
    """Prints the main figures and the paths of summary and report."""
    table = Table("", "start", "end", title=f"run {summary['run_id']}", title_justify="left")
    table.add_row(
        "reward (10 steps)", _number(summary["reward_first"]), _number(summary["reward_last"])
    )
    table.add_row(
        "held-out accuracy", _number(summary["accuracy_first"]), _number(summary["accuracy_last"])
    )
    if widest := summary.get("pass_name"):
        table.add_row(
            f"held-out {widest}", _number(summary["pass_first"]), _number(summary["pass_last"])
        )
    table.add_row(
        "acceptance length",
        _number(summary["accept_len_first"], 2),
        _number(summary["accept_len_last"], 2),
    )
    console.print(table)
    console.print(
        f"{summary['steps']} steps in {duration(summary['wall_s'])}; "
        f"{_number(summary['tokens_per_s'], 0)} tokens/s; "
        f"{summary['drafter_steps']} drafter steps in {duration(summary['drafter_train_slot_s'])} "
        f"of idle slot time; "
        f"trajectories: {summary['trajectories_published']} published, "
        f"{summary['trajectories_trained']} trained, "
        f"{summary['trajectories_lost']} lost",
        highlight=False,
    )
    console.print(
        f"[bold]summary[/] {escape(str(files.summary))}\n"
        f"[bold]report[/]  {escape(str(files.report))}",
        highlight=False,
        soft_wrap=True,
    )


def _number(value: Any, digits: int = 3) -> str:
    return "not measured" if value is None else f"{value:,.{digits}f}"
