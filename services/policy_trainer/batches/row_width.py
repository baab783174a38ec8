"""Chooses the row width of a batch. In wider rows more trajectories share their beginning, but more
masked attention is computed. The better width depends on the similarity of answers, which changes
during a run. See docs/adr/0055.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from paceline.services.policy_trainer.batches.prefixes import Unit

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
