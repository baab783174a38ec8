"""Assigns units to ranks, rows and micro-batches, in plain integers.

A unit is a tree of trajectories with a common beginning, or a single trajectory. Rows
are short (`row_tokens`), because attention covers the whole row and is then masked. A longer
trajectory has its own row. Rows of similar length share a micro-batch, since a micro-batch is as
wide as its widest row.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from paceline.training.packing import first_fit

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


def assign_ranks(lengths: Sequence[int], world_size: int) -> list[list[int]]:
    """Sequence numbers of each rank with balanced token counts: longest first, each to the rank
    with the fewest tokens.

    Deterministic: ties go to the lower sequence number and the lower rank. Each list is ascending.
    """
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for index in _longest_first(lengths):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return [sorted(share) for share in shares]


def pack_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Sequence numbers of each row, widest row first. A sequence longer than `row_tokens` is alone;
    the rest is packed first fit.
    """
    order = _longest_first(lengths)
    alone = [[i] for i in order if lengths[i] > row_tokens]
    rows = first_fit(lengths, row_tokens, order[len(alone) :])
    return alone + sorted(rows, key=lambda row: -sum(lengths[i] for i in row))


def split_rows(
    rows: Sequence[Sequence[int]], lengths: Sequence[int], tokens_per_micro_batch: int
) -> list[list[list[int]]]:
    """Rows of each micro-batch: consecutive rows, at least one, while rows x longest row stays
    within the budget.
    """
    micro_batches: list[list[list[int]]] = []
    width = 0
    for row in rows:
        used = sum(lengths[i] for i in row)
        wider = max(width, used)
        if micro_batches and wider * (len(micro_batches[-1]) + 1) <= tokens_per_micro_batch:
            micro_batches[-1].append(list(row))
            width = wider
        else:
            micro_batches.append([list(row)])
            width = used
    return micro_batches


def plan_micro_batches(
    lengths: Sequence[int], *, world_size: int, row_tokens: int, tokens_per_micro_batch: int
) -> list[list[list[list[int]]]]:
    """plan[rank][micro-batch][row] = sequence numbers. Every rank gets equally many micro-batches,
    some perhaps empty, because all ranks must join the collectives of each.
    """
    plan = []
    for share in assign_ranks(lengths, world_size):
        own = [lengths[i] for i in share]
        rows = pack_rows(own, row_tokens)
        micro_batches = split_rows(rows, own, tokens_per_micro_batch)
        plan.append([[[share[i] for i in row] for row in rows] for rows in micro_batches])
    rounds = max(len(micro_batches) for micro_batches in plan)
    return [
        micro_batches + [[] for _ in range(rounds - len(micro_batches))] for micro_batches in plan
    ]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


ROW_TOKENS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Compared widths. The mask of a still wider row takes more memory than it saves."""
NO_BETTER = 2
"""Number of costlier widths after the best width that end the search."""


class Packing(NamedTuple):
    """Units and their places."""

    units: Sequence[Unit]
    plan: Sequence[Sequence[Sequence[Sequence[int]]]]  # [rank][micro-batch][row], as in packing.py


def widths(tokens_per_micro_batch: int) -> Iterator[int]:
    """Widths that fit in a micro-batch; always the narrowest."""
    return (one for one in ROW_TOKENS if one <= max(tokens_per_micro_batch, ROW_TOKENS[0]))


def cheapest(packings: Iterable[Packing], pair_cost: float) -> Packing:
    """The cheapest packing, the first one among equals. Packings must be ordered by row width."""
    best: tuple[float, Packing] | None = None
    worse = 0
    for packing in packings:
        taken = cost(packing, pair_cost)
        if best is None or taken < best[0]:
            best, worse = (taken, packing), 0
        elif taken > best[0]:
            worse += 1
            if worse == NO_BETTER:
                break
    assert best is not None, "a batch has at least one packing"
    return best[1]


def cost(packing: Packing, pair_cost: float) -> float:
    """Cost of the busiest rank, in the matrix products of so many tokens: every cell of a
    micro-batch, and its attention to the whole row. `pair_cost`: cost of one token's attention to
    another, see model.pair_cost.
    """

    def of(rows: Sequence[Sequence[int]]) -> float:
        width = max(sum(packing.units[unit].tokens for unit in row) for row in rows)
        return len(rows) * width * (1.0 + width * pair_cost)

    return max(sum(of(rows) for rows in rounds if rows) for rounds in packing.plan)
