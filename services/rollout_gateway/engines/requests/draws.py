"""Holds the draw parameters of the running batch while it stays the same."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from paceline.models.sampling import DrawParams
from paceline.services.rollout_gateway.engines.sampling import Sampling


class DrawTable:
    """Parameters of the last batch."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._params: DrawParams | None = None

    def params(
        self, key: Hashable, sampling: Sequence[Sampling], device: torch.device
    ) -> DrawParams:
        """Parameters with one row per element of `sampling`.

        key: must change whenever `sampling` changes.
        """
        if self._params is None or key != self._key:
            self._key = key
            self._params = DrawParams.of(
                [one.seed for one in sampling],
                [one.temperature for one in sampling],
                top_k=[one.top_k for one in sampling],
                top_p=[one.top_p for one in sampling],
                min_p=[one.min_p for one in sampling],
                device=device,
            )
        return self._params
