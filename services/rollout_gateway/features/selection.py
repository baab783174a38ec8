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

    Rows with another token than their position's (from an earlier attempt) are left out.
    """
    tokens = np.asarray(token_ids)
    found: Indices = np.flatnonzero(rows["position"] < len(tokens) - 1)
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
