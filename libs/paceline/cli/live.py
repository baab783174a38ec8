"""Follows a run through its facts, and reads a snapshot after a gap.

Shows it to people as lines and a progress bar, and to programs as JSON lines.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from paceline.cli import command
from paceline.cli.access import DEADLINE_S, coordinator_at
from paceline.config import ServiceConfig
from paceline.errors import DeadlineExceeded, PacelineError
from paceline.events import FactSubscriber
from paceline.local import launch, tokens
from paceline.local.services import SERVICES
from paceline.messages import versions_from_proto
from paceline.report.journal import ACCURACY, PROBE, step_object, widest_pass
from paceline.rpc import channel, check_events, rpc_errors
from paceline.v1 import coordinator_pb2 as pb

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
_QUIET_S = 30.0
"""Seconds without a fact after which the coordinator is polled: it may have restarted."""
_ASK_AGAIN_S = 1.0
"""Minimum seconds between polls of a coordinator that did not reply."""


@dataclass(slots=True)
class RunState:
    """The current state of a run; bounded in size, whatever the run's length."""

    run_id: str
    total_steps: int
    on_record: Callable[[pb.StepRecord], None]  # receives each finished step once
    on_away: Callable[[tuple[str, ...]], None] = lambda services: None  # ... at each change
    on_change: Callable[[], None] = lambda: None  # is called after each fact and snapshot
    phase: str = "starting"
    holders: dict[int, str] = field(default_factory=dict)  # slot -> its holder
    complete: int = 0  # steps received without a gap, from the first
    ahead: set[int] = field(default_factory=set)  # received steps after a gap
    failure: str = ""
    away: tuple[str, ...] = ()  # unreachable services

    def apply_fact(self, fact: pb.Fact) -> None:
        """Applies a fact."""
        if fact.HasField("step_began"):
            self.phase, self.failure = "rollout", ""
        for slots in fact.slots:
            self._slots(slots)
        if fact.HasField("paused"):
            self.phase = "paused" if fact.paused else "ready"
        if fact.HasField("services_away"):
            self._away(fact.services_away.services)
        if fact.HasField("step_finished"):
            self.apply_record(fact.step_finished.record)
        if fact.HasField("run_finished"):
            self.failure = fact.run_finished.failure
            self.phase = "failed" if self.failure else "finished"
        self.on_change()

    def apply_snapshot(self, snapshot: pb.GetSnapshotResponse) -> None:
        """Applies a snapshot after a gap."""
        if snapshot.phase == "new":  # the coordinator has not read its settings yet
            return
        self.total_steps, self.phase = snapshot.total_steps, snapshot.phase
        self.failure = snapshot.failure
        self._away(snapshot.away)
        for slots in snapshot.slots:
            self._slots(slots)
        if snapshot.last_step.step_s:
            self.apply_record(snapshot.last_step)
        self.on_change()

    def apply_record(self, record: pb.StepRecord) -> None:
        """Applies a finished step once: its record is repeated when an evaluation is added."""
        if record.step < self.complete or record.step in self.ahead:
            return
        self.ahead.add(record.step)
        while self.complete in self.ahead:
            self.ahead.remove(self.complete)
            self.complete += 1
        self.on_record(record)

    def _away(self, services: Sequence[str]) -> None:
        if tuple(services) != self.away:
            self.away = tuple(services)
            self.on_away(self.away)

    def _slots(self, slots: pb.SlotRange) -> None:
        holder = enum_word(pb.Holder, slots.holder)
        self.holders.update(dict.fromkeys(range(slots.first, slots.first + slots.count), holder))
        if holder in ("policy", "drafter"):
            self.phase = {"policy": "policy step", "drafter": "rollout, drafter training"}[holder]


async def follow(config: ServiceConfig, state: RunState) -> None:
    """Keeps `state` up to date until the run has ended."""
    async with channel(config.addresses.coordinator, config.security) as connection:
        stub = coordinator_at(connection)
        behind, ended, asked_s = False, False, 0.0

        async def list_steps(first: int) -> pb.ListStepsResponse:
            request = pb.ListStepsRequest(from_step=first)
            page: pb.ListStepsResponse = await stub.ListSteps(request, timeout=DEADLINE_S)
            return page

        async def catch_up(first: int, last: int) -> None:
            nonlocal behind, asked_s
            behind = True
            try:
                with rpc_errors():
                    snapshot = await stub.GetSnapshot(pb.GetSnapshotRequest(), timeout=DEADLINE_S)
                    while page := (await list_steps(state.complete)).steps:
                        for record in page:
                            state.apply_record(record)
            except PacelineError:
                return  # It restarts or has ended; retried with a later fact.
            finally:
                asked_s = time.monotonic()
            behind = False
            state.apply_snapshot(snapshot)

        events, curve_key = config.addresses.events, config.security.curve_key
        check_events(events, config.security)
        with FactSubscriber(events, config.run.id, catch_up, curve_key=curve_key) as facts:
            await catch_up(0, 0)
            # A snapshot may precede a finished run's resume. The next coordinator resumes a failed
            # run.
            while not ended:
                try:
                    fact = await facts.next(_QUIET_S)
                    state.apply_fact(fact)
                    ended = fact.HasField("run_finished") and not fact.run_finished.failure
                except DeadlineExceeded:
                    behind = True
                if behind and time.monotonic() - asked_s >= _ASK_AGAIN_S:
                    await catch_up(0, 0)
            if behind:
                await catch_up(0, 0)


def enum_word(kind: object, value: int) -> str:
    """Last word of an enum value's name in lower case: HOLDER_ENGINE -> engine."""
    return str(kind.Name(value)).rsplit("_", 1)[-1].lower()  # type: ignore[attr-defined]


class RunView:
    """Prints a run's events: lines of text above rich's progress bar, or JSON objects on stdout."""

    def __init__(
        self, run_id: str, total_steps: int, console: Console, *, as_json: bool = False
    ) -> None:
        self.state = RunState(run_id, total_steps, self._show_record, self._show_away, self.refresh)
        self._console = console
        self._as_json = as_json
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
            disable=as_json or not console.is_terminal or console.is_dumb_terminal,
        )
        self._task = self._bar.add_task("", total=total_steps, phase="starting", slots="")

    def show(self, kind: str, markup: str, **facts: Any) -> None:
        """Prints rich markup as a line for people, or the facts as an object for programs."""
        if self._as_json:
            command.print_object(kind, **facts)
        else:
            self._console.print(markup, highlight=False, soft_wrap=True)

    def show_line(self, text: str) -> None:
        """Prints a line of text without markup."""
        self.show("line", escape(text), text=text)

    def show_start(self, directory: Path, plan: Sequence[str]) -> None:
        """Prints the run's directory and plan."""
        run_id = self.state.run_id
        head = f"[bold]run {escape(run_id)}[/] in {escape(str(directory))}"
        lines = "\n".join([head, *map(escape, plan)])
        self.show("run", lines, run_id=run_id, directory=str(directory), plan=list(plan))

    def show_services(self, config: ServiceConfig) -> None:
        """Prints the addresses once all services are healthy."""
        self._serving = True
        addresses = config.addresses
        apis = " ".join(f"http://{one}/v1" for one in addresses.gateways_http)
        call = tokens.example_call(config, addresses.http.rpartition(":")[2])
        lines = (
            f"[bold]everything serves[/]: API {apis}, coordinator {addresses.coordinator}; "
            f"Ctrl-C stops all. Try\n  paceline page {escape(str(config.run.dir))}\n"
            f"  {escape(call)}"
        )
        self.show("serving", lines, http=addresses.http, coordinator=addresses.coordinator)
        self.show_phase("the steps begin")

    def show_event(self, event: launch.ChildEvent) -> None:
        """Prints a process event; people see only unusual events after the start."""
        if self._as_json or not self._serving or event.kind not in _USUAL:
            facts = {"name": event.name, "event": event.kind, "pid": event.pid}
            self.show("process", event_line(event), **facts, detail=event.detail)

    def show_phase(self, text: str) -> None:
        """Shows a phase outside of the steps."""
        self.state.phase = text
        self.refresh()
        if self._bar.disable:
            self.show("phase", f"[dim]{text}[/]", phase=text)

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

    def _show_away(self, services: Sequence[str]) -> None:
        self.show("away", away_line(services), services=list(services))

    def _show_record(self, record: pb.StepRecord) -> None:
        self.show("step", step_line(record, self.state.total_steps), **step_object(record))

    def __enter__(self) -> RunView:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()


_USUAL = ("started", "finished", "stopped")
"""Process events that people see only during the start."""


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


def step_line(record: pb.StepRecord, total: int) -> str:
    """A finished step as one line of text."""
    rate = record.response_tokens / record.rollout_s if record.rollout_s else 0.0
    rounds = Counter(record.arm_rounds)
    parts = [
        f"step {record.step + 1}/{total}",
        f"reward {record.reward_mean:.3f}",
        f"{rate:,.0f} tokens/s",
        f"acceptance {record.accept_length:.2f}" if record.accept_length else "no drafts",
        *(f"{arm} {count / rounds.total():.0%}" for arm, count in rounds.most_common(1)),
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
