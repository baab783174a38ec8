"""What parent and rank say to each other over the rank link: small JSON objects. Owns their shapes only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from paceline.errors import InternalError


@dataclass(frozen=True, slots=True)
class Activate:
    """Train under this lease."""

    epoch: int
    step: int
    drafter_version: int  # serving d
    max_steps: int  # 0: no limit but the epochs of the config
    traceparent: str = ""
    slots: list[int] = field(default_factory=lambda: [0])  # leased; rank i of the members computes on slot i


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
    steps: int = 0
    micro_batches: int = 0
    tokens: int = 0
    loss: float = 0.0  # mean over the micro-batches
    busy_s: float = 0.0
    total_steps: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where rank 0 stands; said when it is ready and whenever that changed."""

    drafter_version: int = 0  # newest candidate
    total_steps: int = 0
    total_tokens: int = 0
    buffer_samples: int = 0
    buffer_bytes: int = 0
    lm_head_hashes: list[str] = field(default_factory=list)  # newest last


@dataclass(frozen=True, slots=True)
class Saving:
    """A checkpoint was begun; it is written while training goes on."""

    total_steps: int
    stall_s: float  # training stood still for it this long


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is complete."""

    path: str
    total_steps: int


Message = Activate | Preempt | NewHead | Serving | Save | Attached | Judged | Stopped | Standing | Saving | Saved
_KINDS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """One JSON object with its kind."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()


def decode(data: bytes) -> Message:
    """The message; InternalError when it is none: parent and rank are one program."""
    try:
        fields = json.loads(data)
        message: Message = _KINDS[fields.pop("kind")](**fields)
    except (ValueError, KeyError, TypeError) as error:
        raise InternalError("a rank message does not decode", seen=repr(error)) from error
    return message
