"""Shows a running demo: a line a step and, on a terminal, a progress bar below the lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from paceline.cli.up import event_line
from paceline.cli.watch import RunState
from paceline.local.launch import ChildEvent
from paceline.local.services import SERVICES
from paceline.report.journal import ACCURACY, PROBE, widest_pass
from paceline.v1.coordinator_pb2 import StepRecord

_PACE_S = 1800.0
"""The time left follows the steps of this many last seconds: one step may take minutes."""
_SLOTS_SHOWN = 8
"""More slots are counted by their holders."""
_EVALUATIONS = {ACCURACY: "held-out accuracy", PROBE: "probe"}


class RunView:
    """Prints what happens to a run; the bar is drawn by rich between its lines."""

    def __init__(self, run_id: str, total_steps: int, console: Console) -> None:
        self.state = RunState(run_id, total_steps, self._record, self._away)
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

    def started(self) -> None:
        """All services are healthy."""
        self._serving = True
        self._line("all services are healthy; the steps begin")
        self.say("first evaluation")

    def event(self, event: ChildEvent) -> None:
        """Starts are shown until everything serves, later only what went wrong."""
        if not self._serving or event.kind not in ("started", "finished", "stopped"):
            self._line(event_line(event))

    def say(self, text: str) -> None:
        """A phase outside the steps."""
        self.state.phase = text
        self.refresh()
        if self._bar.disable:
            self._line(f"[dim]{text}[/]")

    def refresh(self) -> None:
        """Bring the bar up to date with the state."""
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


def away_line(services: Sequence[str]) -> str:
    """Which services do not answer, and what the run does meanwhile."""
    if not services:
        return "[green]all services answer again[/]"
    optional = {spec.name for spec in SERVICES if spec.optional}
    meanwhile = "the run goes on without it" if set(services) <= optional else "the run waits"
    return f"[yellow]away: {', '.join(services)}[/]; {meanwhile}"


def step_line(record: StepRecord, total: int) -> str:
    """One finished step as one line of text."""
    rate = record.response_tokens / record.rollout_s if record.rollout_s else 0.0
    parts = [
        f"step {record.step + 1}/{total}",
        f"reward {record.reward_mean:.3f}",
        f"{rate:,.0f} tokens/s",
        f"acceptance {record.accept_length:.2f}" if record.accept_length else "no drafts",
        *_most_used_arm(record),
        f"drafter steps {record.drafter_steps}",
        f"p{record.versions.policy}.d{record.versions.drafter}",
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
