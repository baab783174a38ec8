"""Reads the names of arms: `<speculator>:<steps>_<topk>_<draft tokens>`, or `off`.

The draft tokens count the root. topk 1 is a chain; more is a tree that keeps its most likely nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OFF = "off"
_ARM = re.compile(r"(?P<speculator>[a-z0-9]+):(?P<steps>\d+)_(?P<topk>\d+)_(?P<tokens>\d+)")


@dataclass(frozen=True, slots=True)
class ArmName:
    """The parts of an arm's name."""

    speculator: str
    steps: int  # levels below the root
    topk: int  # children per node that drafting keeps
    draft_tokens: int  # nodes verified, the root included


def read_arm(name: str) -> ArmName | None:
    """The parts of a name; None for `off` and for names that are built otherwise."""
    found = _ARM.fullmatch(name)
    if found is None:
        return None
    return ArmName(
        found["speculator"], int(found["steps"]), int(found["topk"]), int(found["tokens"])
    )


def speculator_of(arm: str) -> str:
    """The drafter of `<speculator>:...`; empty for an arm that drafts nothing."""
    speculator, colon, _ = arm.partition(":")
    return speculator if colon else ""
