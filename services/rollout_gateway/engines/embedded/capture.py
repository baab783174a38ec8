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
from rollout_gateway.engines.base import RowSink
from rollout_gateway.engines.requests.sequence import RunningSequence


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows of R rejected drafts, parents before their children."""

    rows: Tensor
    """int64 [R]: row of the round, ascending."""
    parents: Tensor
    """int64 [R]: stamp of engines/worker/ring.py."""
    positions: Tensor
    """int64 [R]"""
    token_ids: Tensor
    """int64 [R]"""
    hidden: Tensor
    """[R, W]"""


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

    def wanted(self, sequences: Sequence[RunningSequence]) -> bool:
        """True when rows of one of these requests would be written."""
        return self._sink is not None and any(one.request.capture for one in sequences)

    def write(
        self,
        sequences: Sequence[RunningSequence],
        counts: Sequence[int],
        positions: Tensor,
        token_ids: Tensor,
        hidden: Tensor,
        version: int,
        drafts: DraftRows | None = None,
    ) -> None:
        """Rows 0 .. counts[b] - 1 of every row b whose request asks for capture, then those of
        rejected drafts.

        positions, token_ids int64 [B, Q]; hidden [B, Q, W]: the states AT the token of that
        position.
        """
        if self._sink is None:
            return
        wanted = [
            count if s.request.capture else 0 for s, count in zip(sequences, counts, strict=True)
        ]
        if not any(wanted):
            return
        chosen = torch.arange(positions.shape[1]) < torch.tensor(wanted)[:, None]
        owners = torch.arange(len(wanted)).repeat_interleave(torch.tensor(wanted))
        columns = [
            owners,
            positions.cpu()[chosen],
            token_ids.cpu()[chosen],
            hidden.cpu()[chosen].to(self._dtype),
        ]
        parents = torch.zeros_like(owners)
        if drafts is not None:
            more = (drafts.rows, drafts.positions, drafts.token_ids, drafts.hidden.to(self._dtype))
            columns = [
                torch.cat((column, one.cpu())) for column, one in zip(columns, more, strict=True)
            ]
            parents = torch.cat((parents, drafts.parents.cpu()))
        rows, places, tokens, states = columns
        ids = np.array([s.request.request_id for s in sequences], dtype=np.uint64)
        written = self._sink.write(
            ids[rows.numpy()],
            places.numpy().astype(np.uint32),
            tokens.numpy().astype(np.uint32),
            version,
            states.contiguous().view(torch.uint8).numpy(),
            parents.numpy().astype(np.uint32),
        )
        self.rows_dropped += len(rows) - written
