"""Writes the hidden rows of cached tokens to the sink, for several rounds at once, from the states
kept in slots. The module sets the dtype and the stamps of rows, and the number of waiting rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.models.loading import DTYPES
from paceline.services.rollout_gateway.engines.base import RowSink
from paceline.services.rollout_gateway.engines.embedded.kv_cache import SlotStore
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence

WAITING = 64
"""Minimum number of a request's rows written together, because a call costs as much for a few rows.
With a full batch, one write at most fills the sink's ring.
"""


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """R hidden rows; each is the state at its token."""

    owners: Tensor
    """int64 [R]: row of the batch, ascending."""
    positions: Tensor
    """int64 [R]"""
    token_ids: Tensor
    """int64 [R]"""
    hidden: Tensor
    """[R, W]"""


class Capture:
    """Writes rows and counts the rows dropped by a full sink."""

    def __init__(
        self,
        sink: RowSink | None,
        store: SlotStore,
        features_dtype: str,
    ) -> None:
        self._sink = sink
        self._store = store
        self._dtype = DTYPES[features_dtype]
        self.rows_dropped = 0

    @property
    def possible(self) -> bool:
        """True if a sink exists."""
        return self._sink is not None

    def take(
        self,
        slots: Sequence[int],
        sequences: Sequence[RunningSequence],
        version: int,
        least: int = WAITING,
    ) -> None:
        """Write the waiting rows of each captured sequence that has `least` or more. Waiting rows
        belong to cached tokens not yet written.
        """
        if self._sink is None:
            return
        parts = list[CapturedRows]()
        for owner, (slot, one) in enumerate(zip(slots, sequences, strict=True)):
            if one.request.capture and one.cached - one.captured >= least:
                parts.append(self._waiting(owner, slot, one))
                one.captured = one.cached
        if parts:
            ids = [one.request.request_id for one in sequences]
            self._write(ids, version, parts)

    def _waiting(self, owner: int, slot: int, sequence: RunningSequence) -> CapturedRows:
        stretch = slice(sequence.captured, sequence.cached)
        positions = torch.arange(stretch.start, stretch.stop)
        return CapturedRows(
            torch.full_like(positions, owner),
            positions,
            self._store.token_ids[slot, stretch],
            self._store.hidden[slot, stretch],
        )

    def _write(
        self, request_ids: Sequence[int], version: int, parts: Sequence[CapturedRows]
    ) -> None:
        assert self._sink is not None
        owners, positions, token_ids = (
            torch.cat([getattr(part, name) for part in parts]).cpu().numpy()
            for name in ("owners", "positions", "token_ids")
        )
        states = torch.cat([part.hidden for part in parts]).to(self._dtype).cpu()
        written = self._sink.write(
            np.array(request_ids, dtype=np.uint64)[owners],
            positions.astype(np.uint32),
            token_ids.astype(np.uint32),
            version,
            states.view(torch.uint8).numpy(),
        )
        self.rows_dropped += len(owners) - written
