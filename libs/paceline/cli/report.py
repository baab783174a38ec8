"""Writes the results of a run: `paceline report`. Prints a step's critical path: `paceline why`."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.cli import access, run_files
from paceline.config import ServiceConfig
from paceline.config.load import load_config
from paceline.errors import FailedPrecondition
from paceline.local import patience, processes, services, supervisor
from paceline.local.redis import launcher, resolved
from paceline.report import html, journal
from paceline.report.charts import duration
from paceline.report.figures import OtherRun
from paceline.report.samples import newest_samples, read_samples, write_samples
from paceline.report.summary import Summary, summarize
from paceline.report.why import explain
from paceline.streams import Ledger, LedgerCount, connect
from paceline.whole_files import write_whole

JOURNAL = "journal.jsonl"
STEPS = "steps.jsonl"
SAMPLES = "samples.jsonl"


async def collect(
    config: ServiceConfig, files: run_files.RunFiles, settings: Mapping[str, Any] | None = None
) -> LedgerCount:
    """Copies the journal and some samples into the run's directory, and counts its trajectories.

    Redis must be running. `settings`: settings of the run; None: from its directory. Raises
    Unavailable.
    """
    client = connect(resolved(config).redis.durable_url)
    tokenizer = _tokenizer(files.read_config() if settings is None else settings)
    try:
        await journal.copy_journal(client, config.run.id, files.directory / JOURNAL)
        samples = await newest_samples(client, config.run.id, tokenizer)
        if samples:  # samples of finished steps leave Redis
            write_samples(files.directory / SAMPLES, samples)
        return await Ledger(client, config.run.id).count()
    finally:
        await client.aclose()


def write_results(
    files: run_files.RunFiles,
    ledger: LedgerCount,
    pids: Mapping[str, int],
    other: OtherRun | None = None,
) -> Summary:
    """Writes steps.jsonl, summary.json and report.html. `other`: a run beside it in the report.
    Raises DataLoss if the run has not begun.
    """
    history = journal.read_history(files.directory / JOURNAL)
    summary = summarize(files.run_id, history, ledger, pids, files.read_config())
    journal.write_steps(files.directory / STEPS, history.records)
    write_whole(files.summary, json.dumps(summary, indent=2) + "\n")
    samples = read_samples(files.directory / SAMPLES)
    shown = html.content(summary, history, samples, other)
    write_whole(files.report, html.render(files.run_id, shown))
    return summary


def _tokenizer(settings: Mapping[str, Any]) -> Path:
    """Path of the gateway's tokenizer.json."""
    gateway = settings.get("gateway", {})
    return Path(gateway.get("tokenizer") or gateway.get("model", "")) / "tokenizer.json"


def print_results(summary: Summary, files: run_files.RunFiles, console: Console) -> None:
    """Prints the main figures and the paths of summary and report."""
    table = Table("", "start", "end", title=f"run {summary['run_id']}", title_justify="left")
    for label, key, digits in (
        ("reward (10 steps)", "reward", 3),
        ("held-out accuracy", "accuracy", 3),
        (f"held-out {summary.get('pass_name')}", "pass", 3),
        ("acceptance length", "accept_len", 2),
    ):
        if key != "pass" or summary.get("pass_name"):
            ends = (summary[f"{key}_first"], summary[f"{key}_last"])
            table.add_row(label, *(_number(value, digits) for value in ends))
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


_REDIS_S = 60.0


async def report_run(
    run: str | None, settings: Sequence[Path], console: Console, against: str = ""
) -> int:
    """Writes steps, summary and report of a run up to now, whether active or ended.

    `settings`: settings of the run, instead of its name. `against`: a run beside it in the report.
    Raises NotFound for an unknown run, Unavailable if its Redis cannot be read, DataLoss if it has
    not begun.
    """
    directory = access.directory_of(run, settings)
    config = load_config(ServiceConfig, "local", [directory / "config.toml"])
    files = run_files.files_of(config)
    ledger = await _read_ledger(config, files)
    kept = json.loads(files.summary.read_bytes()) if files.summary.is_file() else {}
    other = await read_other(against, files.read_config()) if against else None
    print_results(write_results(files, ledger, kept.get("pids", {}), other), files, console)
    if other:
        table = Table("setting that differs", files.run_id, other.run_id)
        for row in other.settings:
            table.add_row(*map(escape, row))
        console.print(table)
    return 0


async def read_other(run: str, settings: Mapping[str, Any]) -> OtherRun:
    """A run to show beside the run with these settings, up to now. Raises as `report_run`."""
    config = load_config(ServiceConfig, "local", [access.run_directory(run) / "config.toml"])
    files = run_files.files_of(config)
    await _read_ledger(config, files)
    found = files.read_config()
    history = journal.read_history(files.directory / JOURNAL)
    name = run if found["run"]["id"] == settings["run"]["id"] else files.run_id
    return OtherRun(name, history, run_files.differing(settings, found))


async def _read_ledger(config: ServiceConfig, files: run_files.RunFiles) -> LedgerCount:
    """Reads journal and ledger from the running Redis, or from a temporary server over the run's
    files.
    """
    if _serves(config):
        return await collect(config, files)
    with ExitStack() as stack:
        try:
            stack.enter_context(processes.owned(files.directory, processes.SUPERVISOR))
        except FailedPrecondition:
            return await collect(config, files)  # the run is active
        words = ["--config", str(files.config)]
        redis = supervisor.Supervisor(
            [supervisor.launch_of(services.service("redis"), config, words)], files.directory
        )
        async with redis:
            await redis.start(patience.patient(_REDIS_S))
            return await collect(config, files)


def _serves(config: ServiceConfig) -> bool:
    """Whether the run's durable Redis is running."""
    ours = launcher(config, "durable")
    if ours is None:
        return True  # an external server
    try:
        with processes.owned(ours.directory.parent, ours.directory.name):
            return False
    except FailedPrecondition:
        return True


_LEAST_SHARE = 0.005
"""Parts below this share of the step are left out."""


def show_why(run: str, step: int | None, console: Console) -> None:
    """Prints the main cause and the parts of a step; None: of the slowest step.

    Raises NotFound for an absent run or step.
    """
    config = load_config(ServiceConfig, "local", [access.run_directory(run) / "config.toml"])
    found = explain(run_files.files_of(config).spans, step)
    console.print(found.cause, highlight=False, markup=False)
    table = Table("edge", "span")
    beside = (f"median of {found.peers}", "more") if found.peers else ()
    for name in ("s", "share", *beside):
        table.add_column(name, justify="right")
    for part in found.parts:
        if part.seconds >= _LEAST_SHARE * found.seconds:
            cells = [f"{part.seconds:.3f}", f"{part.seconds / found.seconds:.1%}"]
            if part.median_s is not None:
                cells += [f"{part.median_s:.3f}", f"{part.more_s:+.3f}"]
            table.add_row(part.edge, part.name, *cells)
    console.print(table)
