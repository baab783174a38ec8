"""Lays trajectories that begin alike out as a tree, so that a beginning is computed once for all.

The samples of a group share their prompt, and more of it the surer the policy is; branches of a
session share their turns. A row holds the tree of its trajectories depth first: a token attends to
the tokens before it in whose subtree it is, which are those of its own trajectory. Its hidden state
is that of the trajectory alone, and its gradient the sum over all that go through it.

Shape letters: L tokens of a trajectory that are inputs, W columns of a row.
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
    """Trajectories of one group that lie in one row, next to each other."""

    members: tuple[int, ...]
    tokens: int  # of their tree


class TreeRow:
    """A row while it is filled."""

    def __init__(self) -> None:
        self.width = 0
        self._tokens: list[Tokens] = []
        self._positions: list[Tokens] = []
        self._ended: list[tuple[Tokens, int]] = []  # columns, and where their subtrees end
        self._last: tuple[Tokens, Tokens] = (_NONE, _NONE)  # tokens, and the columns they are in
        self._group = -1

    def add(self, tokens: Tokens, group: int) -> Tokens:
        """The columns of a trajectory's tokens, of which some are the last one's where that is of
        the same group.
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
        """(token ids, positions, subtree ends) of `width` columns. A padding token is a document of
        its own.
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
    """A sequence behind the one of its group that it begins most like."""

    number: int
    tokens: int
    shared: int  # with the one before; 0 for the first


def neighbours(sequences: Sequence[Tokens], groups: Iterable[int]) -> list[list[Neighbour]]:
    """Each group's sequences in the order of their tokens, which makes those neighbours that share
    most.
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
    """Neighbours together, cut where a tree would be larger than `row_tokens`; a longer sequence is
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
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


_NONE = np.zeros(0, np.int64)
