"""What parent and rank say to each other over the rank link: small JSON objects. Owns their shapes only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Activate:
    """Train under this lease."""

    epoch: int
    step: int
    drafter_version: int  # serving d
    max_steps: int  # 0: no limit but the epochs of the config
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop within one micro-batch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class NewHead:
    """A policy head was spooled."""

    policy_version: int
    path: str


@dataclass(frozen=True, slots=True)
class Serving:
    """This set serves now."""

    policy_version: int
    drafter_version: int


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint now; answered by Saved."""


@dataclass(frozen=True, slots=True)
class Attached:
    """Training begins."""

    epoch: int
    world_size: int
    attach_s: float


@dataclass(frozen=True, slots=True)
class Judged:
    """A gate decision; a promoted candidate lies at `path`."""

    epoch: int
    drafter_version: int
    promoted: bool
    candidate: float
    serving: float
    noise: float
    policy_version: int
    positions: int
    optimizer_steps: int
    lm_head_hash: str
    path: str  # where a promoted candidate was written


@dataclass(frozen=True, slots=True)
class Stopped:
    """The activation is over; the slots are free."""

    epoch: int
    reason: str  # "preempted" | "epochs" | "no_data" | "max_steps"
    steps: int
    micro_batches: int
    tokens: int
    loss: float
    busy_s: float
    total_steps: int
    total_tokens: int
    buffer_samples: int
    buffer_bytes: int
    lm_head_hashes: list[str]
    dropped: dict[str, int]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is complete."""

    path: str
    total_steps: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Within the parent: a rank died, and with it the activation."""

    reason: str


Message = Activate | Preempt | NewHead | Serving | Save | Attached | Judged | Stopped | Saved | Lost
_KINDS: Mapping[str, type[Any]] = {
    kind.__name__: kind for kind in (Activate, Preempt, NewHead, Serving, Save, Attached, Judged, Stopped, Saved)
}


def encode(message: Message) -> bytes:
    """One JSON object with its kind."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()


def decode(data: bytes) -> Message:
    """The message; parent and rank are one program, so a bad one is our own fault and raises KeyError or TypeError."""
    fields = json.loads(data)
    message: Message = _KINDS[fields.pop("kind")](**fields)
    return message
