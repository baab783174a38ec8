"""The view of a running demo: a picture that stays in place on a terminal, else one line per step.

Decides nothing.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.live import Live

from paceline.cli.picture import draw
from paceline.cli.run_state import RunState, step_line
from paceline.cli.supervise import event_line
from paceline.local.child import ChildEvent
from paceline.v1.coordinator_pb2 import StepRecord

_REDRAWN_S = 0.25


class View(Protocol):
    """What a run tells its reader."""

    async def started(self) -> None:
        """All services are healthy."""

    def event(self, event: ChildEvent) -> None:
        """Something happened to a process."""

    def record(self, record: StepRecord) -> None:
        """A step is finished."""

    def say(self, text: str) -> None:
        """A phase outside the steps."""

    def __enter__(self) -> View: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_view(state: RunState, console: Console) -> View:
    """The view that fits the console."""
    return (
        LiveView(state, console)
        if console.is_terminal and not console.is_dumb_terminal
        else LineView(state, console)
    )


class LineView:
    """One line per step, for pipes and logs."""

    def __init__(self, state: RunState, console: Console) -> None:
        self._state = state
        self._console = console
        self._serving = False

    async def started(self) -> None:
        """Says that the steps begin."""
        self._serving = True
        self._console.print("all services are healthy; the steps begin", highlight=False)

    def event(self, event: ChildEvent) -> None:
        """Starts are told until everything serves, later only what went wrong."""
        if not self._serving or event.kind in ("died", "restarted", "healthy"):
            self._console.print(event_line(event), highlight=False, soft_wrap=True)

    def record(self, record: StepRecord) -> None:
        """One line."""
        self._console.print(
            step_line(record, self._state.total_steps), highlight=False, soft_wrap=True
        )

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(f"[dim]{text}[/]", highlight=False)

    def __enter__(self) -> LineView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class LiveView:
    """A picture that stays in place.

    It is drawn on the event loop, so that nothing changes while it is drawn.
    """

    def __init__(self, state: RunState, console: Console) -> None:
        self._state = state
        self._console = console
        self._began_s = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._clock: asyncio.Task[None] | None = None

    async def started(self) -> None:
        """The steps begin."""
        self.say("first evaluation")

    def event(self, event: ChildEvent) -> None:
        """The state holds it already."""

    def record(self, record: StepRecord) -> None:
        """The state holds it already."""

    def say(self, text: str) -> None:
        """Shown as the phase."""
        self._state.phase = text
        self._draw()

    def __enter__(self) -> LiveView:
        self._live.start()
        self._clock = asyncio.get_running_loop().create_task(self._redraw())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._draw()
        self._live.stop()

    async def _redraw(self) -> None:
        while True:
            self._draw()
            await asyncio.sleep(_REDRAWN_S)  # time itself is shown

    def _draw(self) -> None:
        elapsed_s = time.monotonic() - self._began_s
        self._live.update(
            draw(self._state, time.time(), elapsed_s, self._console.width), refresh=True
        )
