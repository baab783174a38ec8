"""The per-slot memory of the engine.

A token takes layers * kv_width * item + W * item bytes, while its request runs or is kept. The last
term exists only if a speculator or the capture reads hidden states. W = (inner + 1) * H. The
scheduler assigns the slots of running requests, the prefix cache the remaining slots.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.models import cache, decoder, pages
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.worker.ring import RowRing

WAITING = 64
"""Minimum number of a request's rows written together, because a call costs as much for a few rows.
With a full batch, one write at most fills the sink's ring.
"""


class SlotStore:
    """S slots of C positions; it also writes the hidden rows of cached tokens to the sink."""

    def __init__(
        self,
        weights: decoder.DecoderWeights,
        slots: int,
        capacity: int,
        *,
        keep_hidden: bool,
        inner: tuple[int, ...] = (),
        sink: RowRing | None = None,
        row_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """inner: layers with their input before the last state in a row. sink: receives hidden rows
        in row_dtype.
        """
        self.sink, self._row_dtype = sink, row_dtype
        self.rows_dropped = 0
        """Rows that a full sink has dropped."""
        config, dtype, device = weights.config, weights.head.dtype, weights.head.device
        room = {"layers": config.num_layers, "slots": slots, "capacity": capacity}
        self.kv = cache.StaticCache(config, **room, dtype=dtype, device=device)
        self.token_ids = torch.zeros(slots, capacity, dtype=torch.int64, device=device)
        """int64 [S, C]: the tokens of every slot, undefined after the sequence's end."""
        self.inner = inner
        width = (len(inner) + 1) * config.hidden_size if keep_hidden else 0
        self._shape = (slots, capacity, width)
        self.hidden = pages.zeros(self._shape, dtype, device)
        """[S, C, W]: true hidden states of cached tokens; width 0 if nothing reads them."""
        self.token_bytes = self.kv.token_bytes + width * dtype.itemsize
        """Bytes of a cached token."""

    def release(self) -> int:
        """Free keys, values and hidden states until `allocate`; returns bytes, of which a part was
        perhaps never taken.
        """
        freed = self.kv.release() + self.hidden.nbytes
        self.hidden = self.hidden.new_empty(0)
        return freed

    def allocate(self) -> None:
        """Allocate the freed memory again, with zeros. Raises ResourceExhausted."""
        self.kv.allocate()
        self.hidden = pages.zeros(self._shape, self.hidden.dtype, self.hidden.device)

    def clear(self, slot: int, length: int) -> None:
        """Give the memory of `length` tokens that a slot held back to the system."""
        self.kv.clear(slot, length)
        if length * self.token_bytes >= cache.SPARED:
            pages.give_back(self.hidden[slot])

    def start(self, slot: int, known: tuple[int, ...]) -> None:
        """Store the tokens of a new request."""
        self.token_ids[slot, : len(known)] = torch.tensor(known)

    def cells(self, slots: Tensor, roots: Tensor, count: int) -> Tensor:
        """Flat indices int64 [B * count] of the token cells at positions roots .. roots + count - 1
        of slots [B].
        """
        steps = torch.arange(count, device=roots.device)
        return ((slots * self.kv.capacity + roots)[:, None] + steps).view(-1)

    def keep_hidden(self, cells: Tensor, hidden: Tensor) -> None:
        """Store hidden states [N, W] at token cells [N], for capture and for drafters that catch up
        later.
        """
        if self.hidden.shape[-1]:
            self.hidden.view(-1, self.hidden.shape[-1]).index_copy_(0, cells, hidden)

    def keep_path(self, slots: Tensor, roots: Tensor, path: Tensor) -> None:
        """Move the cache entries of a path [B, P] of tree nodes to consecutive positions from roots
        [B], root first.
        """
        if path.shape[1] > 1:
            steps = torch.arange(path.shape[1], device=path.device)
            self.kv.reorder(slots, roots[:, None] + path, roots[:, None] + steps)

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
        if self.sink is None:
            return
        pairs = [pair for pair in zip(slots, sequences, strict=True) if pair[1].request.capture]
        due = [(slot, one) for slot, one in pairs if one.cached - one.captured >= least]
        if not due:
            return
        ids = np.array([one.request.request_id for _, one in due], dtype=np.uint64)
        positions = [np.arange(one.captured, one.cached, dtype=np.uint32) for _, one in due]
        stretches = [(slot, slice(one.captured, one.cached)) for slot, one in due]
        tokens = torch.cat([self.token_ids[cells] for cells in stretches]).cpu().numpy()
        states = torch.cat([self.hidden[cells] for cells in stretches])
        written = self.sink.write(
            np.repeat(ids, list(map(len, positions))),
            np.concatenate(positions),
            tokens.astype(np.uint32),
            version,
            states.to(self._row_dtype).cpu().view(torch.uint8).numpy(),
        )
        self.rows_dropped += len(tokens) - written
        for _, one in due:
            one.captured = one.cached

    def move(self, source: int, destination: int, length: int) -> None:
        """Move a sequence of `length` tokens to another slot."""
        self.kv.copy(source, destination, 0, length)
        self.token_ids[destination, :length] = self.token_ids[source, :length]
        if self.hidden.shape[-1]:
            self.hidden[destination, :length] = self.hidden[source, :length]
        self.clear(source, length)

    def copy(self, source: int, destination: int, start: int, stop: int) -> None:
        """Copy the cache of tokens start .. stop - 1 to another slot."""
        self.kv.copy(source, destination, start, stop)
        if self.hidden.shape[-1]:
            self.hidden[destination, start:stop] = self.hidden[source, start:stop]
