"""The form of a journal entry, in Redis and in copies: a JSON list of values in the order of
FIELDS. Field names would be repeated in thousands of entries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

FIELDS = ("v", "at_s", "event", "data", "step", "phase", "slots", "record")
"""The last field is absent in most entries. `slots` lists ranges of changed slots: (first slot,
number of slots, holder, epoch).
"""


class SlotUse(StrEnum):
    """The use of a slot-second, exactly one per slot-second: keys of a record's slot_s."""

    GENERATING = "generating"
    POLICY = "policy"
    DRAFTER = "drafter"
    TRANSFERRING = "transferring"  # weights in transfer, to the engine or onto the drafter's slots
    IDLE = "idle"


class IdleCause(StrEnum):
    """The reason for an idle slot: keys of a record's idle_s."""

    UNTRAINED = "untrained"  # no drafter is trained, or none in this step
    TRAINER_AWAY = "trainer_away"
    TRAINER_DONE = "trainer_done"  # the drafter trainer has used all rows and left
    COMMIT = "commit"  # a released worker may be needed as the canary
    ENOUGH = "enough"  # the drafter has max_drafter_slots
    GIVING_BACK = "giving_back"  # its lease is about to end
    SERIAL = "serial"  # the serial drafter schedule trains between policy step and commit
    HAND_OVER = "hand_over"  # all rollouts are done; the slots pass to the policy
    TOO_FEW = "too_few"  # fewer released workers than min_workers_for_training
    LEASING = "leasing"  # about to be leased


def pack_entry(entry: Mapping[str, Any]) -> bytes:
    """The line of an entry."""
    values = [entry[name] for name in FIELDS if name in entry]
    return json.dumps(values, separators=(",", ":")).encode()


def unpack_entry(line: bytes | str) -> dict[str, Any]:
    """The entry of a line, by name. Raises ValueError or RecursionError for a malformed line."""
    values = json.loads(line)
    if not isinstance(values, list) or len(values) > len(FIELDS):
        raise ValueError(f"no list of {', '.join(FIELDS)}")
    return dict(zip(FIELDS, values, strict=False))
