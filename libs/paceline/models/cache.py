"""Keys and values of every slot. The engine assigns requests to slots.

Addresses for all slots are reserved at once; a slot takes memory for the tokens that it holds
(pages.py). A cell holds one head's key or value of one token. Cells of a head are ordered by
position, as attention reads them. One indexed copy per layer stores the output of the fused
projection for a block.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.models import pages
from paceline.models.config import ModelConfig

SPARED = 2 << 20
"""A slot with fewer bytes keeps its pages for the next request: to take them again costs time."""


class StaticCache:
    """[layers, slots, 2 * kv_heads, capacity, head_dim]; the first kv_heads are keys."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        layers: int,
        slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.capacity = capacity
        self._heads, self._dim = config.num_kv_heads, config.head_dim
        self._shape = (layers, slots, 2 * self._heads, capacity, self._dim)
        self.token_bytes = layers * 2 * self._heads * self._dim * dtype.itemsize
        self.data = torch.empty(0, dtype=dtype, device=device)
        self.allocate()

    def allocate(self) -> None:
        """Allocates zeros: masked cells are multiplied too. Raises ResourceExhausted."""
        self.data = pages.zeros(self._shape, self.data.dtype, self.data.device)
        self._flat = self.data.view(self._shape[0], -1, self._dim).unbind(0)

    def release(self) -> int:
        """Frees all memory until `allocate`; returns bytes."""
        size = self.data.nbytes
        self.data, self._flat = self.data.new_empty(0), ()
        return size

    def clear(self, slot: int, length: int) -> None:
        """Gives the memory of a slot back, which held `length` tokens, unless these are few."""
        if length * self.token_bytes >= SPARED:
            for layer in self.data[:, slot]:
                pages.give_back(layer)

    def cells(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Cells for tokens of slots [B] at positions [B, Q]: int64 [B, Q, 2 * kv_heads]."""
        heads = torch.arange(2 * self._heads, device=positions.device)
        return (slots[:, None] * (2 * self._heads) + heads)[:, None] * self.capacity + positions[
            :, :, None
        ]

    def write(self, layer: int, cells: Tensor, rows: Tensor) -> None:
        """Stores rows [N, 2 * kv_heads * head_dim] at cells [N * 2 * kv_heads]."""
        self._flat[layer].index_copy_(0, cells, rows.reshape(-1, self._dim))

    def views(self, rows: slice, length: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values per layer, [B, kv_heads, length, head_dim] each, sharing memory with the
        cache.
        """
        seen = self.data[:, rows, :, :length]
        return seen[:, :, : self._heads].unbind(0), seen[:, :, self._heads :].unbind(0)

    def gather(self, layer: int, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Copies of one layer's keys and values, for slots that are not adjacent."""
        seen = self.data[layer, :, :, :length].index_select(0, rows)
        return seen[:, : self._heads], seen[:, self._heads :]

    def copy(self, source: int, destination: int, start: int, stop: int) -> None:
        """Copies tokens start .. stop - 1 of one slot to another slot."""
        self.data[:, destination, :, start:stop] = self.data[:, source, :, start:stop]

    def reorder(self, slots: Tensor, sources: Tensor, destinations: Tensor) -> None:
        """Copies tokens of slots [B] from positions `sources` [B, P] to `destinations` [B, P]."""
        layers = self.data.view(len(self.data), -1, self._dim)
        moved = layers.index_select(1, self.cells(slots, sources).view(-1))
        layers.index_copy_(1, self.cells(slots, destinations).view(-1), moved)


def cache_rows(slots: Sequence[int]) -> slice | Tensor:
    """Slots as a slice if they are adjacent, so that the cache is read without a copy; else int64
    [B].
    """
    first = slots[0]
    if all(slot == first + offset for offset, slot in enumerate(slots)):
        return slice(first, first + len(slots))
    return torch.tensor(slots)
