"""Shows a run to people as lines and a progress bar, and to programs as JSON lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from paceline.cli import report, run_files, watch
from paceline.cli.command import tell
from paceline.config import ServiceConfig
from paceline.local import launch, tokens
from paceline.local.services import SERVICES
from paceline.messages import versions_from_proto
from paceline.report.journal import ACCURACY, PROBE, step_object, widest_pass
from paceline.report.summary import Summary
from paceline.v1.coordinator_pb2 import StepRecord


class JsonView:
    """The content of RunView as JSON objects; `at` is wall-clock seconds."""

    def __init__(self, run_id: str, total_steps: int) -> None:
        self.state = watch.RunState(run_id, total_steps, self._record, self._away)

    def begin(self, directory: Path, plan: Sequence[str]) -> None:
        """Prints the run's directory and plan."""
        tell("run", run_id=self.state.run_id, directory=str(directory), plan=list(plan))

    def started(self, config: ServiceConfig) -> None:
        """Prints the addresses once all services are healthy."""
        addresses = config.addresses
        tell("serving", http=addresses.http, coordinator=addresses.coordinator)

    def event(self, event: launch.ChildEvent) -> None:
        """Prints an event of a process."""
        tell("process", name=event.name, event=event.kind, pid=event.pid, detail=event.detail)

    def line(self, text: str) -> None:
        """Prints a line of text."""
        tell("line", text=text)

    def say(self, text: str) -> None:
        """Prints a phase outside of the steps."""
        tell("phase", phase=text)

    def failed(self, message: str) -> None:
        """Prints the reason of a failed run."""
        tell("failed", message=message)

    def again(self, command: str) -> None:
        """Prints the command that continues the run."""
        tell("continue", command=command)

    def results(self, summary: Summary, files: run_files.RunFiles) -> None:
        """Prints the summary and the report's path."""
        tell("summary", summary=summary, report=str(files.report))

    def refresh(self) -> None:
        """Does nothing: JSON lines need no refresh."""

    def __enter__(self) -> JsonView:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def _record(self, record: StepRecord) -> None:
        tell("step", **step_object(record))

    def _away(self, services: Sequence[str]) -> None:
        tell("away", services=list(services))


_PACE_S = 1800.0
"""Seconds of past steps that the remaining time is based on: one step may take minutes."""
_SLOTS_SHOWN = 8
"""Above this number, slots are counted by holder."""
_STYLES = {
    "died": "bold red",
    "given_up": "bold red",
    "impaired": "red",
    "waits": "bold yellow",
    "restarted": "yellow",
    "healthy": "green",
    "recovered": "green",
}
_EVALUATIONS = {ACCURACY: "held-out accuracy", PROBE: "probe"}


class RunView:
    """Prints a run's events; rich draws the progress bar below the lines."""

    def __init__(self, run_id: str, total_steps: int, console: Console) -> None:
        self.state = watch.RunState(run_id, total_steps, self._record, self._away)
        self._console = console
        self._serving = False
        self._bar = Progress(
            TextColumn("step [bold]{task.completed}[/] of {task.total}"),
            BarColumn(bar_width=None),
            TextColumn("[bold]{task.fields[phase]}[/]", table_column=Column(no_wrap=True)),
            TextColumn("[dim]{task.fields[slots]}[/]", table_column=Column(no_wrap=True)),
            TimeElapsedColumn(),
            TextColumn("[dim]left[/]"),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=_PACE_S,
            expand=True,
            disable=not console.is_terminal or console.is_dumb_terminal,
        )
        self._task = self._bar.add_task("", total=total_steps, phase="starting", slots="")

    def begin(self, directory: Path, plan: Sequence[str]) -> None:
        """Prints the run's directory and plan."""
        self._line(f"[bold]run {escape(self.state.run_id)}[/] in {escape(str(directory))}")
        for line in plan:
            self.line(line)

    def started(self, config: ServiceConfig) -> None:
        """Prints the addresses once all services are healthy."""
        self._serving = True
        addresses = config.addresses
        apis = " ".join(f"http://{one}/v1" for one in addresses.gateways_http)
        self._line(
            f"[bold]everything serves[/]: API {apis}, coordinator "
            f"{addresses.coordinator}; Ctrl-C stops all. Try"
        )
        self._line(f"  paceline page {escape(str(config.run.dir))}")
        self._line(f"  {escape(tokens.example_call(config, addresses.http.rpartition(':')[2]))}")
        self.say("the steps begin")

    def event(self, event: launch.ChildEvent) -> None:
        """Prints a process event; after the start, only unusual events."""
        if not self._serving or event.kind not in ("started", "finished", "stopped"):
            self._line(event_line(event))

    def line(self, text: str) -> None:
        """Prints a line of text without markup."""
        self._line(escape(text))

    def failed(self, message: str) -> None:
        """Prints the reason of a failed run."""
        self._line(f"[bold red]the run failed:[/] {escape(message)}")

    def again(self, command: str) -> None:
        """Prints the command that continues the run."""
        self._line(f"continue with: [bold]{escape(command)}[/]")

    def results(self, summary: Summary, files: run_files.RunFiles) -> None:
        """Prints the results."""
        report.print_results(summary, files, self._console)

    def say(self, text: str) -> None:
        """Shows a phase outside of the steps."""
        self.state.phase = text
        self.refresh()
        if self._bar.disable:
            self._line(f"[dim]{text}[/]")

    def refresh(self) -> None:
        """Updates the bar from the state."""
        holders = [holder for _, holder in sorted(self.state.holders.items())]
        if len(holders) > _SLOTS_SHOWN:
            holders = [f"{count} {holder}" for holder, count in Counter(holders).items()]
        self._bar.update(
            self._task,
            completed=self.state.complete,
            total=self.state.total_steps,
            phase=self.state.phase,
            slots=f"slots: {', '.join(holders)}" if holders else "",
        )

    def _away(self, services: Sequence[str]) -> None:
        self._line(away_line(services))

    def _record(self, record: StepRecord) -> None:
        self._line(step_line(record, self.state.total_steps))

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def __enter__(self) -> RunView:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()


def event_line(event: launch.ChildEvent) -> str:
    """A process event as one line with rich markup."""
    style = _STYLES.get(event.kind, "dim")
    detail = f": {escape(event.detail)}" if event.detail else ""
    return f"[{style}]{escape(event.name)} {event.kind}[/]{detail} [dim](pid {event.pid})[/]"


def away_line(services: Sequence[str]) -> str:
    """One line: unreachable services and the run's reaction."""
    if not services:
        return "[green]all services answer again[/]"
    optional = {spec.name for spec in SERVICES if spec.optional}
    meanwhile = "the run goes on without it" if set(services) <= optional else "the run waits"
    return f"[yellow]away: {', '.join(services)}[/]; {meanwhile}"


def step_line(record: StepRecord, total: int) -> str:
    """A finished step as one line of text."""
    rate = record.response_tokens / record.rollout_s if record.rollout_s else 0.0
    parts = [
        f"step {record.step + 1}/{total}",
        f"reward {record.reward_mean:.3f}",
        f"{rate:,.0f} tokens/s",
        f"acceptance {record.accept_length:.2f}" if record.accept_length else "no drafts",
        *_most_used_arm(record),
        f"drafter steps {record.drafter_steps}",
        str(versions_from_proto(record.versions)),
        f"{record.step_s:.2f} s",
    ]
    shown = (ACCURACY, widest_pass(record.evaluations), PROBE)
    parts += [
        f"{_EVALUATIONS.get(name, name)} {record.evaluations[name]:.3f}"
        for name in shown
        if name in record.evaluations
    ]
    return "  ".join(parts)


def _most_used_arm(record: StepRecord) -> list[str]:
    rounds = sum(record.arm_rounds.values())
    if not rounds:
        return []
    arm = max(record.arm_rounds, key=lambda name: record.arm_rounds[name])
    return [f"{arm} {record.arm_rounds[arm] / rounds:.0%}"]
