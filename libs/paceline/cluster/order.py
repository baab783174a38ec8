"""Defines a keeper's order and report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.local.launch import ChildEvent
from paceline.ranks.messages import Failed

START_AGAIN = "START_AGAIN"
"""Reason of errors that require a restart of all services of a run on other nodes."""


@dataclass(frozen=True, slots=True)
class PoolOrder:
    """Services to keep running on a node."""

    name: str
    services: Sequence[str]
    run_dir: str  # absolute, on a path that all nodes share
    directory: str  # working directory of the processes
    files: Sequence[str] = ()  # TOML, absolute
    overrides: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    health_s: float = 120.0  # seconds for the start of a service
    host: str = ""  # the node's address


@dataclass(frozen=True, slots=True)
class KeeperReport:
    """The events and state of the services since the last call."""

    next: int  # number of the next event
    events: tuple[ChildEvent, ...] = ()
    healthy: bool = False  # all services have started
    over: bool = False  # supervision has ended
    error: Failed | None = None  # the reason
