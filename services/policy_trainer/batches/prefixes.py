"""Lays trajectories with a common beginning out as a tree, so that the beginning is computed once.

Samples of a group share their prompt, and more text the surer the policy is. Branches of a session
share turns. A row holds the tree depth first. A token attends to earlier tokens with a subtree that
contains it, which are the tokens of its own trajectory. Its hidden state equals the state in the
trajectory alone; its gradient is the sum over all trajectories through it.

Shape letters: L input tokens of a trajectory, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

Tokens = Int[np.ndarray, " L"]


@dataclass(frozen=True, slots=True)
class Unit:
    """Trajectories of one group, adjacent in one row."""

    members: tuple[int, ...]
    tokens: int  # tokens of their tree


class TreeRow:
    """A row while it is being filled."""

    def __init__(self) -> None:
        self.width = 0
        self._tokens: list[Tokens] = []
        self._positions: list[Tokens] = []
        self._ended: list[tuple[Tokens, int]] = []  # columns, and subtree ends
        self._last: tuple[Tokens, Tokens] = (_NONE, _NONE)  # last trajectory: tokens, columns
        self._group = -1

    def add(self, tokens: Tokens, group: int) -> Tokens:
        """The columns of a trajectory's tokens; columns of a common beginning with the last
        trajectory of the group are reused.
        """
        before, columns = self._last
        shared = common_prefix(before, tokens) if group == self._group else 0
        self._ended.append((columns[shared:], self.width))
        new = np.arange(self.width, self.width + len(tokens) - shared)
        self._tokens.append(tokens[shared:])
        self._positions.append(np.arange(shared, len(tokens)))
        self.width += len(new)
        columns = np.concatenate([columns[:shared], new])
        self._last, self._group = (tokens, columns), group
        return columns

    def padded(self, width: int) -> tuple[Tokens, Tokens, Tokens]:
        """(token ids, positions, subtree ends) of `width` columns. A padding token is its own
        document.
        """
        empty = np.zeros(width - self.width, np.int64)
        ends = np.arange(1, width + 1)
        for columns, end in [*self._ended, (self._last[1], self.width)]:
            ends[columns] = end
        return (
            np.concatenate([*self._tokens, empty]),
            np.concatenate([*self._positions, empty]),
            ends,
        )


class Neighbour(NamedTuple):
    """A sequence, after the one of its group with the longest common beginning."""

    number: int
    tokens: int
    shared: int  # tokens shared with the previous sequence; 0 for the first


def neighbours(sequences: Sequence[Tokens], groups: Iterable[int]) -> list[list[Neighbour]]:
    """Each group's sequences sorted by tokens, so that sequences with long common beginnings are
    adjacent.
    """
    by_group: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        by_group.setdefault(group, []).append(number)
    found = []
    for members in by_group.values():
        members.sort(key=lambda i: (sequences[i].astype(">i8").tobytes(), i))
        shared = [common_prefix(sequences[i], sequences[j]) for i, j in pairwise(members)]
        lengths = [len(sequences[i]) for i in members]
        found.append(list(map(Neighbour, members, lengths, [0, *shared])))
    return found


def prefix_units(groups: Iterable[Sequence[Neighbour]], row_tokens: int) -> list[Unit]:
    """Groups adjacent sequences, split where a tree would exceed `row_tokens`; a longer sequence is
    alone.
    """
    units: list[Unit] = []
    for members in groups:
        unit: list[int] = []
        used = 0
        for number, own, shared in members:
            new = own - shared if unit else own
            if unit and used + new > row_tokens:
                units.append(Unit(tuple(unit), used))
                unit, used, new = [], 0, own
            unit.append(number)
            used += new
        units.append(Unit(tuple(unit), used))
    return units


def common_prefix(one: Tokens, other: Tokens) -> int:
    """Length of the common beginning."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


_NONE = np.zeros(0, np.int64)
