"""The per-slot memory of the engine, allocated once: keys and values, token ids, hidden states.

Peak: (max_batch + prefix_slots) * capacity * (layers * kv_width * item + 8 + W * item) bytes. The
last term exists only if a speculator or the capture reads hidden states. W = (inner + 1) * H. The
scheduler assigns the slots of running requests, the prefix cache the remaining slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.models.cache import StaticCache
from paceline.models.decoder import DecoderWeights


class SlotStore:
    """S slots of C positions."""

    def __init__(
        self,
        weights: DecoderWeights,
        slots: int,
        capacity: int,
        *,
        keep_hidden: bool,
        inner: tuple[int, ...] = (),
    ) -> None:
        """inner: layers with their input before the last state in a row."""
        config, dtype, device = weights.config, weights.head.dtype, weights.head.device
        self.kv = StaticCache(
            config,
            layers=config.num_layers,
            slots=slots,
            capacity=capacity,
            dtype=dtype,
            device=device,
        )
        self.token_ids = torch.zeros(slots, capacity, dtype=torch.int64, device=device)
        """int64 [S, C]: the tokens of every slot, undefined after the sequence's end."""
        self.inner = inner
        width = (len(inner) + 1) * config.hidden_size if keep_hidden else 0
        self.hidden = torch.zeros(slots, capacity, width, dtype=dtype, device=device)
        """[S, C, W]: true hidden states of cached tokens; width 0 if nothing reads them."""
        self._hidden_shape = self.hidden.shape

    def release(self) -> int:
        """Free and drop keys, values and hidden states; returns bytes."""
        freed = self.kv.release() + self.hidden.nbytes
        self.hidden = self.hidden.new_empty(0)
        return freed

    def allocate(self) -> None:
        """Allocate the freed memory again."""
        self.kv.allocate()
        self.hidden = self.hidden.new_zeros(self._hidden_shape)

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

    def keep_tokens(self, cells: Tensor, tokens: Tensor) -> None:
        """Store draws [B, P], each in the cell after its node's cell; draws that are not emitted
        are never read.
        """
        self.token_ids.view(-1).index_copy_(0, cells + 1, tokens.reshape(-1))

    def keep_path(self, slots: Tensor, roots: Tensor, path: Tensor) -> None:
        """Move the cache entries of a path [B, P] of tree nodes to consecutive positions from roots
        [B], root first.
        """
        if path.shape[1] > 1:
            steps = torch.arange(path.shape[1], device=path.device)
            self.kv.reorder(slots, roots[:, None] + path, roots[:, None] + steps)

    def move(self, source: int, destination: int, length: int) -> None:
        """Move a sequence of `length` tokens to another slot."""
        self.kv.move(source, destination, length)
        self.token_ids[destination, :length] = self.token_ids[source, :length]
        if self.hidden.shape[-1]:
            self.hidden[destination, :length] = self.hidden[source, :length]

    def copy(self, source: int, destination: int, start: int, stop: int) -> None:
        """Copy the cache of tokens start .. stop - 1 to another slot."""
        self.kv.copy(source, destination, start, stop)
        if self.hidden.shape[-1]:
            self.hidden[destination, start:stop] = self.hidden[source, start:stop]
