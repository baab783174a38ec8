"""The picture of a running demo as rich renderables. Pure: state and time in, drawing out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.cli.run_state import ACCURACY, PROBE, RunState, SlotChange

TIMELINE_S = 20.0
HOLDER_STYLES = {"engine": "blue", "policy": "yellow", "drafter": "green", "none": "bright_black"}
_HOLDER_WORDS = {
    "engine": "rollout",
    "policy": "policy step",
    "drafter": "drafter training",
    "none": "idle",
}
_BLOCKS = "▁▂▃▄▅▆▇█"
_ARM_STYLES = ("blue", "green", "magenta", "cyan", "yellow")


def draw(state: RunState, now_s: float, elapsed_s: float, width: int) -> RenderableType:
    """The whole picture.

    `now_s` is the wall clock, `elapsed_s` the seconds since the start, `width` in characters.
    """
    inner = max(30, width - 22)
    rows = Table.grid(padding=(0, 2))
    rows.add_column(justify="right", style="dim", no_wrap=True)
    rows.add_column(no_wrap=True, overflow="crop")
    for label, value in (*_figures(state, inner), *_slots(state, now_s, inner)):
        rows.add_row(label, value)
    parts: list[RenderableType] = [_progress(state, elapsed_s, width), Text(), rows]
    parts += [Text(note, style="yellow", overflow="ellipsis", no_wrap=True) for note in state.notes]
    return Panel(
        Group(*parts),
        title=f"[bold]paceline[/] {state.run_id}",
        title_align="left",
        border_style="dim",
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest `width` values as blocks between their smallest and largest."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in shown)


def slot_line(
    changes: Sequence[SlotChange], slot: int, now_s: float, width: int, seconds: float = TIMELINE_S
) -> Text:
    """Who held one slot during the last `seconds`, oldest left; the holder at the end of each
    character's time.
    """
    own = [change for change in changes if change.slot == slot]
    line = Text()
    at = -1
    for column in range(width):
        moment = now_s - seconds * (1 - (column + 1) / width)
        while at + 1 < len(own) and own[at + 1].at_s <= moment:
            at += 1
        holder = own[at].holder if at >= 0 else ""
        line.append(
            " " if not holder else "▪" if holder == "none" else "█",
            style=HOLDER_STYLES.get(holder, ""),
        )
    return line


def remaining_s(state: RunState) -> float | None:
    """Seconds to the last step at the pace of the last 20, evaluations included; None before two
    are finished.
    """
    recent = list(state.records)[-21:]
    if len(recent) < 2:
        return None
    pace = (recent[-1].finished_at_s - recent[0].finished_at_s) / (recent[-1].step - recent[0].step)
    return max(0.0, pace * (state.total_steps - recent[-1].step - 1))


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _progress(state: RunState, elapsed_s: float, width: int) -> RenderableType:
    done = state.records[-1].step + 1 if state.records else 0
    left = remaining_s(state)
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    times = f"{clock(elapsed_s)} elapsed" + (f", {clock(left)} left" if left is not None else "")
    grid.add_row(
        f"step [bold]{done}[/] of {state.total_steps}",
        ProgressBar(total=max(1, state.total_steps), completed=done, width=max(10, width - 62)),
        f"[bold]{state.phase}[/]  {times}",
    )
    return grid


def _figures(state: RunState, inner: int) -> list[tuple[str, RenderableType]]:
    records, spark = list(state.records), max(10, inner - 22)
    if not records:
        waiting = Text.from_markup(
            "  ".join(_service(name, kind) for name, kind in state.services.items())
        )
        return [("services", waiting)]
    last = records[-1]
    rate = [r.response_tokens / r.rollout_s for r in records if r.rollout_s]
    live = [r.accept_length for r in records if r.accept_length]
    rewards = [r.reward_mean for r in records]
    trained = sum(record.drafter_steps for record in records)
    accuracy, probe = state.newest(ACCURACY), state.newest(PROBE)
    return [
        ("reward", _series(rewards, 3, spark, "blue")),
        ("held-out accuracy", Text("–" if accuracy is None else f"{accuracy:.3f}", style="bold")),
        ("tokens/s", _series(rate, 0, spark, "cyan")),
        ("acceptance length", _series(live, 2, spark, "green")),
        ("fixed probe", Text("–" if probe is None else f"{probe:.2f}", style="bold")),
        (
            "by drafter",
            Text("  ".join(f"d{d} {length:.2f}" for d, length in state.acceptance.items())),
        ),
        ("arms", _arms(state)),
        ("drafter steps", Text(f"{last.drafter_steps} in the last RL step, {trained} in all")),
        ("serving", Text(f"p{state.versions.policy}.d{state.versions.drafter}", style="bold")),
    ]


def _series(values: Sequence[float], digits: int, width: int, style: str) -> Text:
    if not values:
        return Text("–")
    return Text.assemble(
        (f"{values[-1]:,.{digits}f}".ljust(8), "bold"), (sparkline(values, width), style)
    )


def _service(name: str, kind: str) -> str:
    return f"[green]✓ {name}[/]" if kind == "healthy" else f"[yellow]… {name}[/]"


def _arms(state: RunState) -> Text:
    rounds = state.arm_rounds
    whole = sum(rounds.values())
    text = Text()
    for i, (arm, count) in enumerate(sorted(rounds.items(), key=lambda pair: -pair[1])):
        style = "bright_black" if arm == "off" else _ARM_STYLES[i % len(_ARM_STYLES)]
        text.append("█" * max(1, round(12 * count / whole)), style=style)
        text.append(f" {arm} {count / whole:.0%}  ")
    return text


def _slots(state: RunState, now_s: float, inner: int) -> list[tuple[str, RenderableType]]:
    if not state.holders:
        return []
    changes = list(state.changes)
    lines: list[tuple[str, RenderableType]] = [
        (f"slot {slot}", slot_line(changes, slot, now_s, inner)) for slot in sorted(state.holders)
    ]
    parts = [
        part
        for name, word in _HOLDER_WORDS.items()
        for part in (("█ ", HOLDER_STYLES[name]), f"{word}  ")
    ]
    key = Text.assemble(*parts)
    key.append(f"last {TIMELINE_S:.0f} s", style="dim")
    return [("", Text()), *lines, ("", key)]
