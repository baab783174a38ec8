"""The common part of drafters with attention in the embedded engine: a KV cache that follows the
target's true states slot by slot, and the weights that fill it.

Each drafter decides the cached content and the making of drafts. A drafter may be off for any
number of rounds, since the engine keeps the states.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from paceline.errors import WeightsError
from paceline.models.cache import StaticCache
from paceline.models.rope import rotation_table
from paceline.speculators.base import DraftBatch, SpeculatorSetup
from paceline.speculators.layer.parts import LayerNet
from paceline.speculators.net_drafter import NetDrafter

LAG_ROWS = 8
"""A slot that lacks more rows than this catches up separately, so that other slots need
no padding.
"""

Net = TypeVar("Net", bound=LayerNet)


@dataclass(frozen=True, slots=True)
class KnownRows:
    """R rows of each of B sequences with states computed by the target."""

    index: Tensor
    """int64 [B, 1]: slots."""
    positions: Tensor
    """int64 [B, R]"""
    states: Tensor
    """[B R, .]: the states that the drafter reads."""


class CachedDrafter(NetDrafter[Net]):
    """A speculator with a KV cache (see speculators/base.py for the methods)."""

    def __init__(self, setup: SpeculatorSetup) -> None:
        """Raises the errors of DraftNet.read and fresh, and DataLoss when the engine keeps no
        states for it.
        """
        super().__init__(setup)
        self._layers = setup.layers
        self._config = config = self._net.config
        capacity = setup.capacity + self._net.ahead
        self._cache = StaticCache(
            config,
            layers=self._net.depth,
            slots=setup.slots,
            capacity=capacity,
            dtype=setup.dtype,
            device=self._device,
        )
        self._rotation = rotation_table(config.rope, config.head_dim, capacity).to(self._device)
        self._valid = [0] * setup.slots
        self._serve(self._net)

    # ---- defined by each drafter

    @abstractmethod
    def _fuse(self, net: Net) -> None:
        """Prepares the network's weights, bound to the target's, for inference."""

    @abstractmethod
    def _feed(
        self, batch: DraftBatch, slots: Sequence[int], lengths: Sequence[int], rows: int
    ) -> object:
        """Fills the cache at rows n - 1 - rows .. n - 2 of every slot from true states."""

    # ---- weights

    def _columns_of(self, net: Net) -> slice | list[int]:
        """Columns of kept states that it reads. Raises DataLoss with the names of
        missing states.
        """
        return net.reads.columns(self._layers, self._target.config.hidden_size)

    def _serve(self, net: Net) -> None:
        net.bind(self._target.embed, self._target.head)
        self._columns = self._columns_of(net)
        self._fuse(net)
        self._net = net

    def load_state(self, directory: Path) -> Net:
        """See NetDrafter.load_state. Keys and values of the old weights stay until their rows are
        rewritten.
        """
        net = super().load_state(directory)
        self._columns_of(net)
        seen, serving = net.attention(), self._net.attention()
        if seen != serving:
            message = f"drafter {directory}: its attention is not the serving one's"
            raise WeightsError(message, seen=seen, allowed=serving)
        return net

    # ---- slots

    def free(self, slot: int) -> None:
        """Clears a slot."""
        self._valid[slot] = 0

    def move(self, source: int, destination: int, length: int) -> None:
        """Copies the cached content of a sequence to another slot."""
        self._cache.move(source, destination, length)
        self._valid[destination] = self._valid[source]
        self._valid[source] = 0

    def catch_up(self, batch: DraftBatch) -> None:
        """Fills slots that lack more than LAG_ROWS rows."""
        late = [
            (slot, n)
            for slot, n in zip(batch.slots, batch.lengths, strict=True)
            if n - 1 - self._valid[slot] > LAG_ROWS
        ]
        if late:
            slots, lengths = [slot for slot, _ in late], [n for _, n in late]
            self._feed(batch, slots, lengths, self._lacking(slots, lengths))

    def _lacking(self, slots: Sequence[int], lengths: Sequence[int]) -> int:
        """Largest number of rows with a true state that a slot's cache lacks."""
        return max(n - 1 - self._valid[slot] for slot, n in zip(slots, lengths, strict=True))

    def _known_rows(
        self, batch: DraftBatch, slots: Sequence[int], lengths: Sequence[int], rows: int
    ) -> KnownRows:
        """Rows n - 1 - rows .. n - 2 of every slot, which count as cached from now on.

        Slots that lack fewer rows repeat some, with the same result, so padding and its masks are
        unnecessary. A sequence shorter than `rows` repeats row 0 at its front.
        """
        device = self._device
        last = torch.tensor(lengths, device=device) - 2
        positions = (last[:, None] + torch.arange(1 - rows, 1, device=device)).clamp_(min=0)
        index = torch.tensor(slots, device=device)[:, None]
        for slot, n in zip(slots, lengths, strict=True):
            self._valid[slot] = max(n - 1, 0)
        hidden = batch.hidden[index, positions].flatten(0, 1)[:, self._columns]
        return KnownRows(index, positions, hidden)
