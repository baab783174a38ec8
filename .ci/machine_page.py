"""Draws the coordinator's machine from its tables, for docs/machine.md."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from paceline.services.coordinator.machine import schedule
from paceline.services.coordinator.machine import step as machine
from paceline.services.coordinator.machine.commands import Decision
from paceline.services.coordinator.machine.losses import CALLED_IN
from paceline.services.coordinator.machine.rules import RULES
from paceline.services.coordinator.machine.slots import WORKER_TRANSITIONS
from paceline.services.coordinator.machine.state import Phase

NAMED = {frozenset(machine.BEGUN): "all but new", frozenset(machine.LIVE): "all live"}
TRACKS = (
    ("The run", machine.RUN),
    ("Rollouts, while it is running", machine.ROLLOUTS),
    ("The learner, while it is running", machine.LEARNER),
)


def machine_page() -> str:
    """The phases as a diagram and a table, the events and the workers as tables."""
    theory = inspect.getdoc(machine) or ""
    lines = [
        "# The coordinator's machine",
        "",
        "Written by `make docs` from the tables in `services/coordinator/machine/`.",
        "",
        *(f"    {line[4:]}" if line.startswith("    ") else line for line in theory.splitlines()),
        *("", "## Phases"),
        *(line for title, table in TRACKS for line in track_lines(title, table)),
        "",
        "Failed may follow every live phase; a resumed run continues from there.",
        *("", "## Rules", "", *rule_table()),
        *("", "## Schedules", "", *(inspect.getdoc(schedule) or "").splitlines()),
        *("", "## Events", "", *event_table()),
        *("", "## Workers", "", *worker_diagram()),
    ]
    return "\n".join(lines) + "\n"


def track_lines(title: str, table: Mapping[Phase, machine.PhaseRow]) -> Iterator[str]:
    """The phases of the run or of one track, as a state diagram and a table."""
    edges = [(phase, then, "") for phase, row in table.items() for then in row.then]
    yield from ("", f"### {title}", "", *diagram(edges), "", *phase_table(table))


def learner_diagram() -> Iterator[str]:
    """The learner's phases as a state diagram."""
    edges = [(phase, then, "") for phase, row in machine.LEARNER.items() for then in row.then]
    yield from diagram(edges)


def worker_diagram() -> Iterator[str]:
    """WORKER_TRANSITIONS as a state diagram."""
    yield from diagram((one, then, cause) for (one, cause), then in WORKER_TRANSITIONS.items())


def diagram(edges: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Edges as mermaid draws them."""
    yield from ("```mermaid", "stateDiagram-v2")
    for one, then, label in edges:
        yield f"    {one} --> {then}{f' : {label}' if label else ''}"
    yield "```"


FIGURES: Mapping[str, Callable[[], Iterator[str]]] = {
    "workers": worker_diagram,
    "learner": learner_diagram,
}
"""Figures of ARCHITECTURE.md, by name."""


def rule_table() -> Iterator[str]:
    """What is looked at after every event, in this order."""
    yield from ("| rule | action |", "|---|---|")
    for rule in RULES:
        yield f"| `{rule.__module__.rsplit('.')[-1]}.{rule.__name__}` | {first_paragraph(rule)} |"


def phase_table(table: Mapping[Phase, machine.PhaseRow]) -> Iterator[str]:
    """What entering each phase does, and whom it waits for."""
    yield from ("| phase | action on entry | waits for |", "|---|---|---|")
    for phase, row in table.items():
        services = ", ".join(service.replace("_", " ") for service in CALLED_IN.get(phase, ()))
        entering = "" if row.enter is Decision else first_paragraph(row.enter)
        yield f"| {phase} | {entering} | {services} |"


def event_table() -> Iterator[str]:
    """What each event means, when it may come and what it does."""
    yield from ("| event | in phases | late | effect |", "|---|---|---|---|")
    for event, row in machine.EVENTS.items():
        phases = NAMED.get(frozenset(row.phases)) or ", ".join(
            one for one in Phase if one in row.phases
        )
        place = f"{row.handle.__module__.rsplit('.')[-1]}.{row.handle.__name__}"
        effect = f"{first_paragraph(row.handle)} `{place}`"
        late = first_paragraph(row.late).replace("Never late", "never").removeprefix("Late ")
        meaning = f"{event.__name__}: {first_paragraph(event)}"
        yield f"| {meaning} | {phases} | {late.rstrip('.')} | {effect} |"


def first_paragraph(documented: Callable[..., Any]) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
