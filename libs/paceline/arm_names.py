"""Parses arm names: `<speculator>:<steps>_<topk>_<draft tokens>`, or `off`.

The draft tokens include the root. topk 1 is a chain; a larger topk is a tree that keeps its most
likely nodes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError

OFF = "off"
_ARM = re.compile(r"(?P<speculator>[a-z0-9]+):(?P<steps>\d+)_(?P<topk>\d+)_(?P<tokens>\d+)")


@dataclass(frozen=True, slots=True)
class TreeSize:
    """The size of a draft tree, in the units of arm names."""

    steps: int  # levels below the root
    topk: int  # children per node that the draft keeps
    draft_tokens: int  # nodes per verification, including the root

    @property
    def capacity(self) -> int:
        """Maximum nodes of a tree with these steps and topk, including the root."""
        return 1 + self.topk + max(self.steps - 1, 0) * self.topk**2


ROOT = TreeSize(steps=0, topk=1, draft_tokens=1)
"""The tree size of `off`."""
LARGEST = TreeSize(steps=1023, topk=1023, draft_tokens=1024)


@dataclass(frozen=True, slots=True)
class ArmName:
    """The parts of an arm's name."""

    name: str
    speculator: str  # empty for `off`
    shape: TreeSize

    @property
    def drafted(self) -> int:
        """Maximum draft tokens per row and round."""
        return self.shape.draft_tokens - 1


def read_arm(name: str) -> ArmName | None:
    """Parses a name; None for `off` and for any name that is not an arm."""
    found = _ARM.fullmatch(name)
    if found is None:
        return None
    shape = TreeSize(int(found["steps"]), int(found["topk"]), int(found["tokens"]))
    return ArmName(name, found["speculator"], shape)


def parse_arm(name: str, speculators: Mapping[str, bool], most: TreeSize = LARGEST) -> ArmName:
    """Parses a name and checks that the engine can serve the arm.

    `speculators` maps each drafter of the engine to whether it can draft trees. `most` is the
    largest tree. Raises ConfigError for any other name.
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
        message = f"{found.speculator} drafts chains here"
        raise ConfigError(message, seen=name, allowed="topk 1, steps + 1 tokens")

    least = shape.steps + 1 if shape.topk == 1 else 2
    largest = min(shape.capacity, most.draft_tokens)
    if not least <= shape.draft_tokens <= largest:
        allowed = f"{least}-{largest} draft tokens; a chain has its steps and the root"
        raise ConfigError("no tree has so many nodes", seen=name, allowed=allowed)
    return found


def speculator_of(arm: str) -> str:
    """The drafter of `<speculator>:...`; empty for `off`."""
    speculator, colon, _ = arm.partition(":")
    return speculator if colon else ""
