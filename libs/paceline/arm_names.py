"""Reads the names of arms: `<speculator>:<steps>_<topk>_<draft tokens>`, or `off`.

The draft tokens count the root. topk 1 is a chain; more is a tree that keeps its most likely nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError

OFF = "off"
_ARM = re.compile(r"(?P<speculator>[a-z0-9]+):(?P<steps>\d+)_(?P<topk>\d+)_(?P<tokens>\d+)")


@dataclass(frozen=True, slots=True)
class TreeSize:
    """A draft tree, as the names of arms count it."""

    steps: int  # levels below the root
    topk: int  # children per node that drafting keeps
    draft_tokens: int  # nodes verified, the root included

    @property
    def capacity(self) -> int:
        """Most nodes a tree of these steps and topk can have, the root included."""
        return 1 + self.topk + max(self.steps - 1, 0) * self.topk**2


ROOT = TreeSize(steps=0, topk=1, draft_tokens=1)
"""Of `off`."""
LARGEST = TreeSize(steps=1023, topk=1023, draft_tokens=1024)


@dataclass(frozen=True, slots=True)
class ArmName:
    """One way to draft, as its name says."""

    name: str
    speculator: str  # empty: off
    shape: TreeSize

    @property
    def drafted(self) -> int:
        """Tokens proposed to each row of a round, at most."""
        return self.shape.draft_tokens - 1


def read_arm(name: str) -> ArmName | None:
    """The parts of a name; None for `off` and for names that are built otherwise."""
    found = _ARM.fullmatch(name)
    if found is None:
        return None
    shape = TreeSize(int(found["steps"]), int(found["topk"]), int(found["tokens"]))
    return ArmName(name, found["speculator"], shape)


def parse_arm(name: str, speculators: Mapping[str, bool], most: TreeSize = LARGEST) -> ArmName:
    """An arm that an engine can serve; speculators: what it drafts with, and whether as trees.

    Raises ConfigError for any other.
    """
    if name == OFF:
        return ArmName(OFF, "", ROOT)
    found = read_arm(name)
    if found is None or found.speculator not in speculators:
        allowed = f"{OFF} or <{' | '.join(speculators)}>:<steps>_<topk>_<draft tokens>"
        raise ConfigError("not an arm of this engine", seen=name, allowed=allowed)
    shape = found.shape
    if not (1 <= shape.steps <= most.steps and 1 <= shape.topk <= most.topk):
        allowed = f"steps 1-{most.steps}, topk 1-{most.topk}"
        raise ConfigError("no such tree", seen=name, allowed=allowed)
    if shape.topk != 1 and not speculators[found.speculator]:
        raise ConfigError(
            f"{found.speculator} drafts chains here", seen=name, allowed="topk 1, steps + 1 tokens"
        )

    if shape.topk == 1 and shape.draft_tokens != shape.steps + 1:
        raise ConfigError(
            "a chain has as many nodes as steps and root",
            seen=name,
            allowed=f"{shape.steps + 1} draft tokens",
        )

    largest = min(shape.capacity, most.draft_tokens)
    if not 2 <= shape.draft_tokens <= largest:
        raise ConfigError(
            "no tree has so many nodes", seen=name, allowed=f"2-{largest} draft tokens"
        )

    return found


def speculator_of(arm: str) -> str:
    """The drafter of `<speculator>:...`; empty for an arm that drafts nothing."""
    speculator, colon, _ = arm.partition(":")
    return speculator if colon else ""
