"""Hidden rows of verified tokens to the sink, one vectorised call per forward.

Owns their dtype and their stamps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.models.loading import DTYPES
from paceline.services.rollout_gateway.engines.base import RowSink
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """R hidden rows: states AT tokens."""

    owners: Tensor
    """int64 [R]: row of the batch, ascending."""
    parents: Tensor
    """int64 [R]: stamp of engines/worker/ring.py; parents before their children."""
    positions: Tensor
    """int64 [R]"""
    token_ids: Tensor
    """int64 [R]"""
    hidden: Tensor
    """[R, W]"""


def sequence_rows(
    counts: Sequence[int], positions: Tensor, token_ids: Tensor, hidden: Tensor
) -> CapturedRows:
    """Of rows b of tokens [B, Q] and states [B, Q, W] the first counts[b], on the host."""
    chosen = torch.arange(positions.shape[1]) < torch.tensor(counts)[:, None]
    owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    columns = (column.cpu()[chosen] for column in (positions, token_ids, hidden))
    return CapturedRows(owners, torch.zeros_like(owners), *columns)


class Capture:
    """Writes rows; those that find no room are dropped by the sink and counted here."""

    def __init__(
        self, sink: RowSink | None, features_dtype: str, *, rejected: bool = False
    ) -> None:
        self._sink = sink
        self._dtype = DTYPES[features_dtype]
        self.takes_rejected = rejected and sink is not None
        self.rows_dropped = 0
        self.rejected_left_out = 0

    @property
    def possible(self) -> bool:
        """True when there is somewhere to write."""
        return self._sink is not None

    def wanted(self, sequences: Sequence[RunningSequence], counts: Sequence[int]) -> list[int]:
        """Of each request's `counts` rows those that are written: all or none."""
        return [
            count if self.possible and one.request.capture else 0
            for one, count in zip(sequences, counts, strict=True)
        ]

    def write(
        self, sequences: Sequence[RunningSequence], version: int, *parts: CapturedRows
    ) -> None:
        """Rows of sequences, then those of rejected drafts."""
        if self._sink is None:
            return
        owners, parents, positions, token_ids = (
            torch.cat([getattr(part, name).cpu() for part in parts]).numpy()
            for name in ("owners", "parents", "positions", "token_ids")
        )
        states = torch.cat([part.hidden.cpu().to(self._dtype) for part in parts])
        ids = np.array([one.request.request_id for one in sequences], dtype=np.uint64)
        written = self._sink.write(
            ids[owners],
            positions.astype(np.uint32),
            token_ids.astype(np.uint32),
            version,
            states.view(torch.uint8).numpy(),
            parents.astype(np.uint32),
        )
        self.rows_dropped += len(owners) - written
