"""Hidden rows of verified tokens to the sink, one vectorised call per forward. Owns their dtype and their stamps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.models.loading import DTYPES
from rollout_gateway.engines.base import RowSink
from rollout_gateway.engines.sequence import RunningSequence


class Capture:
    """Writes rows while it is enabled; rows that find no room are dropped by the sink and counted here."""

    def __init__(self, sink: RowSink | None, features_dtype: str) -> None:
        self._sink = sink
        self._dtype = DTYPES[features_dtype]
        self.enabled = sink is not None
        self.rows_dropped = 0

    @property
    def possible(self) -> bool:
        """True when there is somewhere to write."""
        return self._sink is not None

    def wanted(self, sequences: Sequence[RunningSequence]) -> bool:
        """True when rows of one of these requests would be written."""
        return self._sink is not None and self.enabled and any(one.request.capture for one in sequences)

    def write(
        self,
        sequences: Sequence[RunningSequence],
        counts: Sequence[int],
        positions: Tensor,
        token_ids: Tensor,
        hidden: Tensor,
        version: int,
    ) -> None:
        """Rows 0 .. counts[b] - 1 of every row b whose request asks for capture.

        positions, token_ids int64 [B, Q]; hidden [B, Q, H]: the state AT the token of that position.
        """
        if self._sink is None or not self.enabled:
            return
        wanted = [count if s.request.capture else 0 for s, count in zip(sequences, counts, strict=True)]
        total = sum(wanted)
        if not total:
            return
        chosen = torch.arange(positions.shape[1]) < torch.tensor(wanted)[:, None]
        rows = hidden.cpu()[chosen].to(self._dtype).contiguous().view(torch.uint8).numpy()
        ids = np.repeat(np.array([s.request.request_id for s in sequences], dtype=np.uint64), wanted)
        written = self._sink.write(
            ids,
            positions.cpu()[chosen].numpy().astype(np.uint32),
            token_ids.cpu()[chosen].numpy().astype(np.uint32),
            version,
            rows,
        )
        self.rows_dropped += total - written
