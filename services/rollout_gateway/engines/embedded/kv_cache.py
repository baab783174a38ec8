"""Everything the engine remembers per slot, in tensors allocated once: keys and values, token ids,
hidden states.

Owns memory only; which request sits in which slot is the scheduler's, and what the slots behind the
running ones keep the prefix cache's. Peak: (max_batch + prefix_slots) * capacity * (layers *
kv_width * item + 8 + W * item) bytes, the last term only where a speculator or the capture reads
hidden states. W = (inner + 1) * H.
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
        """inner: layers whose input a row of states holds before the last state."""
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
        """int64 [S, C]: known tokens, garbage behind them."""
        self.inner = inner
        width = (len(inner) + 1) * config.hidden_size if keep_hidden else 0
        self.hidden = torch.zeros(slots, capacity, width, dtype=dtype, device=device)
        """[S, C, W]: true hidden states of cached tokens; width 0 when nobody reads them."""
        self._hidden_shape = self.hidden.shape

    def release(self) -> int:
        """Free keys, values and hidden states, and forget them; returns bytes."""
        freed = self.kv.release() + self.hidden.nbytes
        self.hidden = self.hidden.new_empty(0)
        return freed

    def allocate(self) -> None:
        """Take what `release` freed again."""
        self.kv.allocate()
        self.hidden = self.hidden.new_zeros(self._hidden_shape)

    def start(self, slot: int, known: tuple[int, ...]) -> None:
        """Take in the tokens of a new request."""
        self.token_ids[slot, : len(known)] = torch.tensor(known)

    def cells(self, slots: Tensor, roots: Tensor, count: int) -> Tensor:
        """Flat token cells int64 [B * count] of positions roots .. roots + count - 1 of slots
        [B].
        """
        steps = torch.arange(count, device=roots.device)
        return ((slots * self.kv.capacity + roots)[:, None] + steps).view(-1)

    def keep_hidden(self, cells: Tensor, hidden: Tensor) -> None:
        """Store hidden states [N, W] at token cells [N], for drafters that catch up later and for
        capture.
        """
        if self.hidden.shape[-1]:
            self.hidden.view(-1, self.hidden.shape[-1]).index_copy_(0, cells, hidden)

    def keep_tokens(self, cells: Tensor, tokens: Tensor) -> None:
        """Store draws [B, P], each one position behind its node's cell; those not emitted are
        garbage nobody reads.
        """
        self.token_ids.view(-1).index_copy_(0, cells + 1, tokens.reshape(-1))

    def keep_path(self, slots: Tensor, roots: Tensor, path: Tensor) -> None:
        """Nodes [B, P] of a tree kept behind roots [B] become a run of tokens, root first."""
        if path.shape[1] > 1:
            steps = torch.arange(path.shape[1], device=path.device)
            self.kv.reorder(slots, roots[:, None] + path, roots[:, None] + steps)

    def move(self, source: int, destination: int, length: int) -> None:
        """A sequence of `length` known tokens goes to another slot."""
        self.kv.move(source, destination, length)
        self.token_ids[destination, :length] = self.token_ids[source, :length]
        if self.hidden.shape[-1]:
            self.hidden[destination, :length] = self.hidden[source, :length]

    def copy(self, source: int, destination: int, start: int, stop: int) -> None:
        """What is cached of tokens start .. stop - 1 of one slot goes to another as well."""
        self.kv.copy(source, destination, start, stop)
        if self.hidden.shape[-1]:
            self.hidden[destination, start:stop] = self.hidden[source, start:stop]
