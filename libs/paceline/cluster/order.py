"""What a keeper is told and what it says, as JSON: Ray carries text alone for us."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline import errors
from paceline.errors import InternalError, PacelineError
from paceline.local.launch import ChildEvent

START_AGAIN = "START_AGAIN"
"""Reason of errors after which all services of a run have to be started again, elsewhere."""
FORKSERVER = "forkserver"
"""What a pool's forkserver is called; its pool follows where there are several."""


@dataclass(frozen=True, slots=True)
class ServiceOrder:
    """One service to be kept running on a node."""

    name: str
    run_dir: str  # absolute, on a path that every node has
    directory: str  # in which its process is started
    files: Sequence[str] = ()  # TOML, absolute
    overrides: Sequence[str] = ()
    modules: Sequence[str] = ()  # of a forkserver: those that it imports
    needs: Mapping[str, bool] = field(default_factory=dict)  # others by name: whether optional
    environment: Mapping[str, str] = field(default_factory=dict)
    health_s: float = 120.0
    heartbeat_s: float = 3.0
    hung_s: float = 30.0
    host: str = ""  # address of the node that the others know it by

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> ServiceOrder:
        """What `text` gave."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class KeeperReport:
    """What has become of a service since the last look."""

    next: int  # number of the first event that is not told yet
    events: tuple[ChildEvent, ...] = ()
    healthy: bool = False
    over: bool = False  # nothing is kept running any more
    error: PacelineError | None = None  # why

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
        """What `text` gave."""
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
