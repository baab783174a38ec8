"""The nouns of supervision: how a process is started, what happens to it, how often it may die."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from paceline.local import news

EventKind = (
    Literal["started", "healthy", "died", "waits", "restarted", "given_up", "finished", "stopped"]
    | news.News
)


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start one process, and how to see that it serves."""

    name: str
    command: tuple[str, ...]  # () for a server that others run: only its health is awaited
    # Gets a deadline in seconds; returns what a user should know; raises PacelineError.
    healthy: Callable[[float], Awaitable[str | None]] | None = None
    depends_on: tuple[str, ...] = ()  # names that must be healthy first
    ports: tuple[tuple[str, str], ...] = ()  # (address, setting) it binds
    environment: Mapping[str, str] = field(default_factory=dict)
    ends_run: bool = False  # the run is over when it exits with status 0
    optional: bool = False  # the others go on without it
    # Asked all the time of a server that tells of no turns; as `healthy`, and quick.
    ping: Callable[[float], Awaitable[object]] | None = None
    listening: socket.socket | None = None  # its input: a socket that outlives its restarts


@dataclass(frozen=True, slots=True)
class ChildEvent:
    """What happened to a process, for a terminal view."""

    name: str
    kind: EventKind
    pid: int
    detail: str = ""


class Needed(Protocol):
    """What a process needs to know of another one without which it cannot work."""

    @property
    def launch(self) -> Launch:
        """How that is started."""
        ...

    @property
    def is_healthy(self) -> asyncio.Event:
        """Set while it is."""
        ...


class Supervised(Needed, Protocol):
    """A process that is kept running, wherever it is."""

    @property
    def log(self) -> Path:
        """What it prints."""
        ...

    @property
    def pid(self) -> int:
        """Process id; 0 when none runs."""
        ...

    async def run(self) -> None:
        """Start and restart; returns when the process exits with status 0. Raises RunFailed and
        Unavailable.
        """
        ...

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, `grace_s` seconds, SIGKILL; after run() has been cancelled."""
        ...


Keep = Callable[[Launch, Sequence[Supervised]], Supervised]
"""Makes what keeps a launch running, given those it needs."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most `tries` restarts within `window_s` seconds, with pauses of base_s, 2 base_s, ... up
    to cap_s.
    """

    tries: int = 5
    window_s: float = 120.0
    base_s: float = 0.5
    cap_s: float = 10.0
