"""Keys and values of every slot, allocated once. Owns the memory; who sits in which slot is the engine's affair.

A row holds what one token leaves behind: its keys of all KV heads, then its values, as the fused projection emits them,
so one copy per layer stores both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.models.config import ModelConfig


class StaticCache:
    """[layers, slots, capacity, 2 * kv_heads * head_dim]."""

    def __init__(
        self, config: ModelConfig, *, layers: int, slots: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity = capacity
        self._heads, self._dim = config.num_kv_heads, config.head_dim
        self.data = torch.zeros(layers, slots, capacity, config.kv_width, dtype=dtype, device=device)
        self.flat = self.data.view(layers, slots * capacity, config.kv_width).unbind(0)
        """Per layer [slots * capacity, width]: where rows are written."""

    def views(self, rows: slice, length: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values per layer, [B, kv_heads, length, head_dim] each, sharing memory with the cache."""
        return self._split(self.data[:, rows, :length])

    def gather(self, layer: int, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer for slots that do not follow each other; copies."""
        keys, values = self._split(self.data[layer, :, :length].index_select(0, rows)[None])
        return keys[0], values[0]

    def _split(self, seen: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        layers, batch, length, _ = seen.shape
        heads = seen.view(layers, batch, length, 2, self._heads, self._dim).transpose(2, 4)
        return heads[:, :, :, 0].unbind(0), heads[:, :, :, 1].unbind(0)

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` rows of a slot to another."""
        self.data[:, destination, :length] = self.data[:, source, :length]


def cache_rows(slots: Sequence[int]) -> slice | Tensor:
    """Slots as a slice when they follow each other, so that the cache is read without a copy; else int64 [B]."""
    first = slots[0]
    if all(slot == first + offset for offset, slot in enumerate(slots)):
        return slice(first, first + len(slots))
    return torch.tensor(slots)
