"""Shards names over the replicas of a gateway: whose a session, a key or a completion is stands in
its name, so that nobody has to remember it.

A replica draws the random part of a name until its hash falls to itself: as many tries as there
are replicas, on average.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass


def shard_of(name: str, count: int) -> int:
    """The replica of a name, the same in every process."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little") % count


@dataclass(frozen=True, slots=True)
class Shard:
    """Index of a replica and number of replicas; a gateway without replicas has one."""

    index: int = 0
    count: int = 1

    def holds(self, name: str) -> bool:
        """Whether a name belongs to this replica."""
        return self.count == 1 or shard_of(name, self.count) == self.index

    def draw(self, make: Callable[[], str]) -> str:
        """The first of the names that `make` draws which is this replica's."""
        while not self.holds(name := make()):
            pass
        return name
