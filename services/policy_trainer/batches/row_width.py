"""Chooses how wide the rows of a batch are: in wide ones more trajectories share what they begin
with, and more attention is computed that is then masked. What is better depends on how alike the
answers are, which changes in a run. See docs/adr/0055.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from paceline.services.policy_trainer.batches.prefixes import Unit

ROW_TOKENS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Widths that are compared. The mask of a wider row takes more memory than is saved in it."""
NO_BETTER = 2
"""So many dearer ones after the best, and wider ones are not looked at."""


class Packing(NamedTuple):
    """Units, and which of them lie where."""

    units: Sequence[Unit]
    plan: Sequence[Sequence[Sequence[Sequence[int]]]]  # [rank][micro-batch][row], as in packing.py


def widths(tokens_per_micro_batch: int) -> Iterator[int]:
    """Those that a micro-batch has room for; the narrowest in any case."""
    return (one for one in ROW_TOKENS if one <= max(tokens_per_micro_batch, ROW_TOKENS[0]))


def cheapest(packings: Iterable[Packing], pair_cost: float) -> Packing:
    """The one that takes least; the first of equals. Packings come by the width of their rows."""
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
    """What the rank that has most to do computes, in the products of so many tokens: every cell of
    a micro-batch, and its attention to all of the row. `pair_cost`: of one token's attention to
    another, see model.pair_cost.
    """

    def of(rows: Sequence[Sequence[int]]) -> float:
        width = max(sum(packing.units[unit].tokens for unit in row) for row in rows)
        return len(rows) * width * (1.0 + width * pair_cost)

    return max(sum(of(rows) for rows in rounds if rows) for rounds in packing.plan)
