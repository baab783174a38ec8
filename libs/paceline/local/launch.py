"""Defines the data of supervision: launches, process events and restart policies."""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from paceline.local import news

EventKind = (
    Literal["started", "healthy", "died", "waits", "restarted", "given_up", "finished", "stopped"]
    | news.News
)


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of one process and its health check."""

    name: str
    command: tuple[str, ...]  # () for an external server: only its health is awaited
    # Gets a deadline in seconds. Returns a remark for the user. Raises PacelineError.
    healthy: Callable[[float], Awaitable[str | None]] | None = None
    depends_on: tuple[str, ...] = ()  # services that must be healthy first
    ports: tuple[tuple[str, str], ...] = ()  # (address, setting) pairs that it binds
    environment: Mapping[str, str] = field(default_factory=dict)
    ends_run: bool = False  # the run ends when it exits with status 0
    optional: bool = False  # other services continue without it
    # Quick health check of a server that reports no turns; called repeatedly.
    ping: Callable[[float], Awaitable[object]] | None = None
    listening: socket.socket | None = None  # a socket as stdin that outlives restarts


@dataclass(frozen=True, slots=True)
class ChildEvent:
    """An event in the life of a process, for display."""

    name: str
    kind: EventKind
    pid: int
    detail: str = ""


class Supervised(Protocol):
    """A supervised process, or the services of a node."""

    launch: Launch
    is_healthy: asyncio.Event
    """Set while it is healthy."""

    @property
    def pid(self) -> int:
        """Process id; 0 if it does not run."""
        ...

    async def run(self) -> None:
        """Starts and restarts the process; returns when it exits with status 0. Raises RunFailed
        and Unavailable.
        """
        ...

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, waits `grace_s` seconds, sends SIGKILL. Call it after run() is
        cancelled.
        """
        ...


Keep = Callable[[Launch, Sequence[Supervised]], Supervised]
"""Creates the supervised process of a launch from its dependencies."""


@dataclass(slots=True)
class RestartPolicy:
    """Allows at most `tries` restarts within `window_s` seconds. Pauses are base_s, 2 base_s, ...
    up to cap_s. Use one per process.
    """

    tries: int = 5
    window_s: float = 120.0
    base_s: float = 0.5
    cap_s: float = 10.0
    ends: deque[float] = field(default_factory=deque, init=False)  # time.monotonic()

    def note_end(self) -> bool:
        """Notes an end of the process. Returns whether it may start again."""
        self.ends.append(time.monotonic())
        while self.ends[-1] - self.ends[0] > self.window_s:
            self.ends.popleft()
        return len(self.ends) <= self.tries

    async def pause(self) -> None:
        """Waits before the next start."""
        doublings = min(len(self.ends) - 1, 32)
        await asyncio.sleep(min(self.base_s * 2.0**doublings, self.cap_s))
