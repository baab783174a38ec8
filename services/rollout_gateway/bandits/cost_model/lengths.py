"""How long running responses will still be, from those that have ended. Owns no request."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

REMEMBERED = 512
"""Responses that have ended."""
NEWS_SHARE = 16
"""The sorted lengths are made anew when this part of them has come since."""

Floats = npt.NDArray[np.float64]


class ResponseLengths:
    """The empirical mean residual life: of the remembered responses longer than g, the mean of
    length - g.
    """

    def __init__(self) -> None:
        self._ended: deque[int] = deque(maxlen=REMEMBERED)
        self._sorted: Floats = np.zeros(0)
        self._sums: Floats = np.zeros(1)  # [n + 1] of the lengths from index i on
        self._news = 0

    def add(self, lengths: Sequence[int]) -> None:
        """Responses of these lengths have ended."""
        self._ended.extend(lengths)
        self._news += len(lengths)

    def remaining(self, generated: Floats, limit: Floats) -> Floats:
        """Tokens [B] still to come of responses with `generated` of at most `limit` tokens.

        The limit counts as one response that went on to it, so that a response longer than all
        remembered ones is expected to reach it, and the others hardly feel it.
        """
        if self._news > len(self._sorted) // NEWS_SHARE:
            self._sorted = np.sort(np.array(self._ended, dtype=np.float64))
            self._sums = np.concatenate((self._sorted[::-1].cumsum()[::-1], [0.0]))
            self._news = 0
        first = np.searchsorted(self._sorted, generated, side="right")
        longer = len(self._sorted) - first
        left: Floats = np.maximum(limit - generated, 1.0)
        mean: Floats = (self._sums[first] - longer * generated + left) / (longer + 1)
        return np.minimum(mean, left)
