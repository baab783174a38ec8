"""Selects the rows of a finished request for its feature batch.

Pure functions on rows in the ring's order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.services.rollout_gateway.engines.worker.ring import RowArray

Indices = npt.NDArray[np.int64]


def longest_run(rows: RowArray, token_ids: Sequence[int]) -> Indices:
    """Indices [T] of the longest run of adjacent positions, with the newest row of each, without
    the last token's row.

    Rows with another token than their position's (from an earlier attempt) and rows of rejected
    drafts are left out.
    """
    tokens = np.asarray(token_ids)
    found: Indices = np.flatnonzero((rows["parent"] == 0) & (rows["position"] < len(tokens) - 1))
    found = found[rows["token_id"][found] == tokens[rows["position"][found]]]
    if not len(found):
        return found
    written = rows["position"][found].astype(np.int64)
    if (np.diff(written) == 1).all():
        return found  # the usual case: no row computed twice or lost
    positions, from_end = np.unique(written[::-1], return_index=True)
    newest = found[len(found) - 1 - from_end]
    edges = np.flatnonzero(np.diff(positions) != 1) + 1
    stretches: list[Indices] = np.split(newest, edges)
    return max(stretches, key=len)


def hanging_drafts(rows: RowArray, path: Indices) -> tuple[Indices, Indices]:
    """Rejected drafts attached to the rows of `path` [T], directly or through other drafts, and
    their parents.

    Indices [R] are in the order of writing. Parents [R]: i < T is path[i], T + j is draft j. A
    draft without its parent (dropped, left out or recomputed) is dropped with its subtree.
    """
    if not rows["parent"].any():
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing
    index, stamps = np.arange(len(rows)), rows["parent"].astype(np.int64)
    positions = rows["position"].astype(np.int64)
    own = stamps == 0
    last = np.maximum.accumulate(np.where(own, index, -1))
    # a call's rows of one sequence are adjacent
    beside = last - (positions[last] - (positions - 1))
    above = np.where(own, index, np.where(stamps == 1, beside, index - (stamps - 1)))
    inside = (above >= 0) & (above < index)
    above = np.where(inside, above, index)
    held = inside & (positions[above] == positions - 1) & (own[above] == (stamps == 1))
    held[path] = True
    while True:
        narrowed = held & held[above]
        if np.array_equal(narrowed, held):
            break
        held = narrowed

    drafts = np.flatnonzero(held & ~own)
    places = np.empty(len(rows), dtype=np.int64)
    places[path] = np.arange(len(path))
    places[drafts] = len(path) + np.arange(len(drafts))
    return drafts, places[above[drafts]]
