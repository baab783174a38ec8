"""Says how an entry of a run's journal is written, in Redis and in its copy: a JSON list of values
in the order of FIELDS, which stand for names that thousands of entries would repeat.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

FIELDS = ("v", "at_s", "event", "data", "step", "phase", "slots", "record")
"""The last one is left out of most entries. `slots` lists ranges of changed slots: (first slot,
number of slots, holder, epoch).
"""


class SlotUse(StrEnum):
    """What a slot-second went into, each one into one of these: the keys of a record's slot_s."""

    GENERATING = "generating"
    POLICY = "policy"
    DRAFTER = "drafter"
    TRANSFERRING = "transferring"  # weights on their way, and the drafter's onto its slots
    IDLE = "idle"


class IdleCause(StrEnum):
    """Why nobody used a slot: the keys of a record's idle_s."""

    UNTRAINED = "untrained"  # no drafter is trained, or not in this step
    TRAINER_AWAY = "trainer_away"
    TRAINER_DONE = "trainer_done"  # it has learned what there was and left
    COMMIT = "commit"  # a released worker may be trying the set
    ENOUGH = "enough"  # the drafter has max_drafter_slots
    GIVING_BACK = "giving_back"  # its lease is about to end
    SERIAL = "serial"  # it is trained between the policy's step and the commit
    HAND_OVER = "hand_over"  # all rollouts are done, the slots go to the policy
    TOO_FEW = "too_few"  # fewer released workers than min_workers_for_training
    LEASING = "leasing"  # about to be leased


def pack_entry(entry: Mapping[str, Any]) -> bytes:
    """The line of an entry."""
    values = [entry[name] for name in FIELDS if name in entry]
    return json.dumps(values, separators=(",", ":")).encode()


def unpack_entry(line: bytes | str) -> dict[str, Any]:
    """The entry of a line, by name. Raises ValueError or RecursionError for what is none."""
    values = json.loads(line)
    if not isinstance(values, list) or len(values) > len(FIELDS):
        raise ValueError(f"no list of {', '.join(FIELDS)}")
    return dict(zip(FIELDS, values, strict=False))
