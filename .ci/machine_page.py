"""Draws the coordinator's machine from its tables, for docs/machine.md."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from coordinator.machine import step as machine
from coordinator.machine.decision import Decision
from coordinator.machine.losses import CALLED_IN
from coordinator.machine.state import WORKER_TRANSITIONS, Phase

NAMED = {frozenset(machine.BEGUN): "all but new", frozenset(machine.LIVE): "all that go on"}


def machine_page() -> str:
    """The phases as a diagram and a table, the events and the workers as tables."""
    theory = inspect.getdoc(machine) or ""
    lines = [
        "# The coordinator's machine",
        "",
        "Written by `make docs` from the tables in `services/coordinator/machine/`.",
        "",
        *(f"    {line[4:]}" if line.startswith("    ") else line for line in theory.splitlines()),
        *("", "## Phases", "", *phase_diagram(), ""),
        "Failed may follow every phase that goes on; a resumed run enters again what failed.",
        *("", *phase_table(), "", "## Events", "", *event_table()),
        *("", "## Workers", "", *worker_diagram()),
    ]
    return "\n".join(lines) + "\n"


def phase_diagram() -> Iterator[str]:
    """PHASES as a state diagram."""
    edges = [(phase, then) for phase, row in machine.PHASES.items() for then in row.then]
    yield from diagram((phase, then, "") for phase, then in edges)


def worker_diagram() -> Iterator[str]:
    """WORKER_TRANSITIONS as a state diagram."""
    yield from diagram((one, then, cause) for (one, cause), then in WORKER_TRANSITIONS.items())


def diagram(edges: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Edges as mermaid draws them."""
    yield from ("```mermaid", "stateDiagram-v2")
    for one, then, label in edges:
        yield f"    {one} --> {then}{f' : {label}' if label else ''}"
    yield "```"


def phase_table() -> Iterator[str]:
    """What entering each phase does, and whom it waits for."""
    yield from ("| phase | entering it | waits for an answer of |", "|---|---|---|")
    for phase, row in machine.PHASES.items():
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
