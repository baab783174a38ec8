"""Deals the faults of a run: the same seed gives the same faults in the same order.

A new kind needs a line of KINDS, and for a new action code in inject.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.errors import InvalidInput


class Action(StrEnum):
    """Effect of a fault on its target."""

    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP, and SIGCONT later
    DELAY = "delay"  # each chunk of its connections is late for a while
    RESET = "reset"  # its connections end at once, with RST where they are TCP
    HALF_CLOSE = "half-close"  # data from clients no longer arrives; answers still do
    CORRUPT = "corrupt"  # one byte of a chunk of weights is another
    FILL = "fill"  # the disk has no room until a service waits for room


class Trigger(StrEnum):
    """Event that a fault waits for."""

    ROLLOUT = "rollout"  # fact: a step began
    DRAFTER = "drafter"  # fact: the drafter trainer holds a slot
    POLICY = "policy"  # fact: the policy trainer holds its slots
    PUSH = "push"  # the proxy has forwarded the first part of a version
    PREPARED = "prepared"  # the version is in the gateway's spool and is not committed
    CHECKPOINT = "checkpoint"  # the directory of an unfinished checkpoint has appeared
    COMMITTED = "committed"  # fact: a step ended


GATEWAY, REDIS, DISK = "gateway", "redis", "disk"
FORKSERVER, SUPERVISOR = "forkserver", "supervisor"
PROCESSES = (
    "coordinator",
    GATEWAY,
    "engine worker",
    "policy rank",
    "policy trainer",
    "drafter rank",
    "drafter trainer",
    REDIS,
    "redis features",
    FORKSERVER,
    SUPERVISOR,
)
ANY = tuple(Trigger)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault."""

    name: str
    action: Action
    targets: tuple[str, ...]  # it hits one target, or `at_once` targets
    triggers: tuple[Trigger, ...] = ANY
    at_once: int = 1


KINDS: tuple[Kind, ...] = (
    *(Kind(f"kill {one}", Action.KILL, (one,)) for one in PROCESSES),
    *(Kind(f"stop {one}", Action.STOP, (one,)) for one in PROCESSES),
    Kind("kill two at once", Action.KILL, PROCESSES[:-1], at_once=2),
    *(
        Kind(f"{action} connections of {target}", action, (target,))
        for target in (GATEWAY, REDIS)
        for action in (Action.DELAY, Action.RESET, Action.HALF_CLOSE)
    ),
    # Redis' protocol has no checksum, so a flipped byte there is not a fault that it can see.
    Kind("corrupt a push", Action.CORRUPT, (GATEWAY,), (Trigger.POLICY,)),
    Kind("kill gateway in a push", Action.KILL, (GATEWAY,), (Trigger.PUSH,)),
    Kind("kill policy rank in a push", Action.KILL, ("policy rank",), (Trigger.PUSH,)),
    Kind("reset a push", Action.RESET, (GATEWAY,), (Trigger.PUSH,)),
    Kind("kill gateway before commit", Action.KILL, (GATEWAY,), (Trigger.PREPARED,)),
    Kind("kill coordinator before commit", Action.KILL, ("coordinator",), (Trigger.PREPARED,)),
    Kind("kill policy rank in a checkpoint", Action.KILL, ("policy rank",), (Trigger.CHECKPOINT,)),
    Kind(
        "kill policy trainer in a checkpoint",
        Action.KILL,
        ("policy trainer",),
        (Trigger.CHECKPOINT,),
    ),
    Kind("fill disk", Action.FILL, (DISK,)),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a run."""

    number: int  # from 1 on
    kind: Kind
    targets: tuple[str, ...]
    trigger: Trigger
    pick: float  # in [0, 1): which of several processes of a kind

    @property
    def title(self) -> str:
        """Name of the fault for people."""
        whom = f" ({', '.join(self.targets)})" if self.kind.at_once > 1 else ""
        return f"{self.kind.name}{whom} at {self.trigger}"


def deal(seed: int, faults: int, *, own_disk: bool = True, only: Sequence[str] = ()) -> list[Fault]:
    """Deals the faults of a run; every kind occurs once before a kind occurs again.

    Without a disk of its own, no fault fills the disk. `only` names the kinds to deal. Raises
    InvalidInput for an unknown kind.
    """
    if unknown := set(only) - {kind.name for kind in KINDS}:
        names = [kind.name for kind in KINDS]
        raise InvalidInput("no such kind of fault", seen=sorted(unknown), allowed=names)
    draw, deck = random.Random(seed), list[Kind]()
    dealt: list[Fault] = []
    kinds = [
        kind
        for kind in KINDS
        if (own_disk or kind.action is not Action.FILL) and (not only or kind.name in only)
    ]
    for number in range(1, faults + 1):
        if not deck:
            deck = draw.sample(kinds, len(kinds))
        kind = deck.pop()
        targets = tuple(draw.sample(kind.targets, kind.at_once))
        dealt.append(Fault(number, kind, targets, draw.choice(kind.triggers), draw.random()))
    return dealt
