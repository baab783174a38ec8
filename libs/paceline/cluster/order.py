"""Defines a keeper's order and report as JSON, because Paceline passes only text through Ray."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline import errors
from paceline.errors import InternalError, PacelineError
from paceline.local.launch import ChildEvent

START_AGAIN = "START_AGAIN"
"""Reason of errors that require a restart of all services of a run on other nodes."""
FORKSERVER = "forkserver"
"""Name of a forkserver; with several pools, the pool's name is appended."""


@dataclass(frozen=True, slots=True)
class ServiceOrder:
    """A service to keep running on a node."""

    name: str
    run_dir: str  # absolute, on a path that all nodes share
    directory: str  # working directory of the process
    files: Sequence[str] = ()  # TOML, absolute
    overrides: Sequence[str] = ()
    modules: Sequence[str] = ()  # modules that a forkserver imports
    needs: Mapping[str, bool] = field(default_factory=dict)  # dependency: whether it is optional
    environment: Mapping[str, str] = field(default_factory=dict)
    health_s: float = 120.0
    heartbeat_s: float = 3.0
    hung_s: float = 30.0
    host: str = ""  # the node's address

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> ServiceOrder:
        """Reverses `text`."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class KeeperReport:
    """The events and state of a service since the last call."""

    next: int  # number of the next event
    events: tuple[ChildEvent, ...] = ()
    healthy: bool = False
    over: bool = False  # supervision has ended
    error: PacelineError | None = None  # the reason

    def text(self) -> str:
        """As JSON."""
        told = {
            "next": self.next,
            "events": [asdict(event) for event in self.events],
            "healthy": self.healthy,
            "over": self.over,
            "error": _error_facts(self.error),
        }
        return json.dumps(told)

    @classmethod
    def of(cls, text: str) -> KeeperReport:
        """Reverses `text`."""
        told = json.loads(text)
        events = tuple(ChildEvent(**event) for event in told.pop("events"))
        return cls(**{**told, "events": events, "error": _error(told["error"])})


def _error_facts(error: PacelineError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    said = {name: getattr(error, name) for name in ("message", "reason", "seen", "allowed")}
    return {"kind": type(error).__name__, **said}


def _error(told: dict[str, Any] | None) -> PacelineError | None:
    if told is None:
        return None
    kind = getattr(errors, told.pop("kind"), InternalError)
    made: PacelineError = kind(told.pop("message"), **told)
    return made
