"""Writes the hidden rows of cached tokens to the sink, for several rounds at once, from the states
kept in slots. The module sets the dtype and the stamps of rows, and the number of waiting rows.
"""

from collections.abc import Sequence

import numpy as np
import torch

from paceline.models.loading import DTYPES
from paceline.services.rollout_gateway.engines.embedded.kv_cache import SlotStore
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.worker.ring import RowRing

WAITING = 64
"""Minimum number of a request's rows written together, because a call costs as much for a few rows.
With a full batch, one write at most fills the sink's ring.
"""


class Capture:
    """Writes rows and counts the rows dropped by a full sink."""

    def __init__(self, sink: RowRing | None, store: SlotStore, features_dtype: str) -> None:
        self._sink = sink
        self._store = store
        self._dtype = DTYPES[features_dtype]
        self.rows_dropped = 0

    @property
    def possible(self) -> bool:
        """True if a sink exists."""
        return self._sink is not None

    def write_rows(
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
        due = [
            (slot, one)
            for slot, one in zip(slots, sequences, strict=True)
            if one.request.capture and one.cached - one.captured >= least
        ]
        if not due:
            return
        ids = np.array([one.request.request_id for _, one in due], dtype=np.uint64)
        positions = [np.arange(one.captured, one.cached, dtype=np.uint32) for _, one in due]
        stretches = [(slot, slice(one.captured, one.cached)) for slot, one in due]
        tokens = torch.cat([self._store.token_ids[cells] for cells in stretches]).cpu().numpy()
        states = torch.cat([self._store.hidden[cells] for cells in stretches])
        written = self._sink.write(
            np.repeat(ids, list(map(len, positions))),
            np.concatenate(positions),
            tokens.astype(np.uint32),
            version,
            states.to(self._dtype).cpu().view(torch.uint8).numpy(),
        )
        self.rows_dropped += len(tokens) - written
        for _, one in due:
            one.captured = one.cached
