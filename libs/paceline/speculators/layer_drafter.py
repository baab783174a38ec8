"""Drafts chains and trees with a network of one decoder layer.

Each drafter defines the layer's input and the logits of its output. Drafting fills the cache from
the drafter's own features; the next catch-up overwrites those rows from true hidden states.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import WeightsError
from paceline.models import cache, decoder, loading, products, rope
from paceline.speculators import base, layer_net, net_drafter

LAG_ROWS = 8
"""A slot that lacks more rows than this catches up separately, so that other slots do not compute
padding for it.
"""

Net = TypeVar("Net", bound=layer_net.LayerNet)


class CachedDrafter(net_drafter.NetDrafter[Net]):
    """A speculator with a KV cache (see speculators/base.py for the methods)."""

    _head: Tensor
    """[Vd, H]: head of the draftable tokens, a slice of the target's if `_fuse` sets no other."""

    def __init__(self, setup: base.SpeculatorSetup) -> None:
        """Raises the errors of DraftNet.read and fresh, and DataLoss if the engine lacks the states
        that the drafter reads.
        """
        super().__init__(setup)
        self._layers = setup.layers
        self._config = config = self._net.config
        on_cpu = setup.dtype is torch.float32 and self._device.type == "cpu"
        if on_cpu and products.prefers_bfloat16(config.hidden_size, self._device):
            self._dtype = torch.bfloat16
        capacity = setup.capacity + self._net.ahead
        self._cache = cache.StaticCache(
            config,
            layers=self._net.depth,
            slots=setup.slots,
            capacity=capacity,
            dtype=self._dtype,
            device=self._device,
        )
        self._rotation = rope.rotation_table(config.rope, config.head_dim, capacity).to(
            self._device
        )
        self._valid = [0] * setup.slots
        self._serve(self._net)

    # ---- defined by each drafter kind

    @abstractmethod
    def _fuse(self, net: Net, tensors: Mapping[str, Tensor]) -> None:
        """Make the network's tensors, bound to the target's, ready for inference."""

    @abstractmethod
    def _feed(
        self, batch: base.DraftBatch, slots: Sequence[int], lengths: Sequence[int], rows: int
    ) -> object:
        """Fills the cache at rows n - 1 - rows .. n - 2 of every slot from true states; n is the
        slot's length.
        """

    # ---- weights

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)

    def _serve(self, net: Net) -> None:
        net.bind(self._target.embed, self._target.head)
        self._columns = net.reads.columns(self._layers, self._config.hidden_size)
        ids = net.token_ids
        self._drafted = None if ids is None else ids.to(self._device)
        head = self._target.head
        head = head if ids is None else head.index_select(0, ids.to(self._device))
        self._head = head.to(self._dtype)
        self._net = net
        self._fuse(net, {name: value.detach() for name, value in net.state_dict().items()})

    def _fused_layer(self, tensors: Mapping[str, Tensor], prefix: str) -> decoder.LayerWeights:
        return loading.fuse_layer(self._config, tensors, prefix, self._dtype, self._device)

    def _use_fast_products(self, layers: Iterable[decoder.LayerWeights], *more: Tensor) -> None:
        """Measures products with these layers' matrices, with `more` and with the head's slice."""
        own = [one for w in layers for one in (w.qkv, w.output, w.gate_up, w.down)]
        slices = () if self._head is self._target.head else (self._head,)
        products.serve_matrices(one for one in (*own, *more, *slices) if isinstance(one, Tensor))

    def _embedded(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self._target.embed).to(self._dtype)

    def _with_ids(self, drafts: base.Drafts) -> base.Drafts:
        return replace(drafts, tokens=self._token_ids(drafts.tokens))

    def load_state(self, directory: Path) -> Net:
        """See NetDrafter.load_state. Keys and values of the old weights stay until their rows are
        rewritten. Raises WeightsError if the attention differs from the serving network's.
        """
        net = super().load_state(directory)
        net.reads.columns(self._layers, self._config.hidden_size)  # raises for missing states
        seen, serving = net.attention(), self._net.attention()
        if seen != serving:
            message = f"drafter {directory}: its attention is not the serving one's"
            raise WeightsError(message, seen=seen, allowed=serving)
        return net

    # ---- slots

    def free(self, slot: int) -> None:
        """Clears a slot."""
        self._cache.clear(slot, self._valid[slot])
        self._valid[slot] = 0

    def move(self, source: int, destination: int, length: int) -> None:
        """Moves the cached rows of a sequence to another slot."""
        self._cache.copy(source, destination, 0, length)
        self._valid[destination] = self._valid[source]
        self._valid[source] = 0

    def catch_up(self, batch: base.DraftBatch) -> None:
        """Fills the missing rows of slots that lack more than LAG_ROWS rows."""
        late = [
            (slot, n)
            for slot, n in zip(batch.slots, batch.lengths, strict=True)
            if n - 1 - self._valid[slot] > LAG_ROWS
        ]
        if late:
            slots, lengths = [slot for slot, _ in late], [n for _, n in late]
            self._feed(batch, slots, lengths, self._lacking(slots, lengths))

    def _lacking(self, slots: Sequence[int], lengths: Sequence[int]) -> int:
        """Largest number of rows with true states that a slot's cache lacks."""
        return max(n - 1 - self._valid[slot] for slot, n in zip(slots, lengths, strict=True))

    def _known_rows(
        self, batch: base.DraftBatch, slots: Sequence[int], lengths: Sequence[int], rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """R = `rows` rows n - 1 - R .. n - 2 of every slot: slots int64 [B, 1], positions int64 [B,
        R], and the states [B R, .] that the drafter reads. From now on they count as filled.

        Slots that lack fewer rows compute some rows again, with the same result. So neither padding
        nor a mask for padding is needed. A sequence shorter than `rows` repeats row 0 at its front.
        """
        device = self._device
        last = torch.tensor(lengths, device=device) - 2
        positions = (last[:, None] + torch.arange(1 - rows, 1, device=device)).clamp_(min=0)
        index = torch.tensor(slots, device=device)[:, None]
        for slot, n in zip(slots, lengths, strict=True):
            self._valid[slot] = max(n - 1, 0)
        hidden = batch.hidden[index, positions].flatten(0, 1)[:, self._columns]
        return index, positions, hidden.to(self._dtype)

    def _masked_block(
        self, batch: base.DraftBatch, positions: Tensor, length: int, layout: decoder.Layout
    ) -> decoder.Block:
        """Plan of one forward over all rows of the batch, see decoder.make_block."""
        rows = cache.cache_rows(batch.slots)
        places = (self._config, self._rotation, self._cache, rows, positions, length, layout)
        return decoder.make_block(*places, masked=True)


class LayerDrafter(CachedDrafter[Net]):
    """A speculator of one layer (see speculators/base.py for the methods)."""

    _layer: decoder.LayerWeights
    """The serving version's layer, set by `_fuse`."""

    # ---- defined by each drafter

    @abstractmethod
    def _true_features(self, hidden: Tensor) -> Tensor:
        """Features [N, H] of the target's states [N, W]."""

    @abstractmethod
    def _enter(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """From token ids int64 [N] and features [N, H]: the residual [N, H] of the layer, and its
        queries, keys and values [N, .].
        """

    @abstractmethod
    def _logits(self, features: Tensor) -> Tensor:
        """Logits [..., draft ids] of features [..., H]."""

    # ---- drafting

    def propose(self, batch: base.DraftBatch, shape: base.DraftShape) -> base.Drafts:
        """The most likely chain or tree; see Speculator.propose."""
        self.catch_up(batch)
        lacking = self._lacking(batch.slots, batch.lengths)
        entered = self._feed(batch, batch.slots, batch.lengths, max(lacking, 1))
        blocks = self._chain_blocks(batch, 1 if shape.topk > 1 else shape.steps)
        features = self._leave(*entered, blocks[0])
        if shape.topk > 1:
            return self._tree(batch, features, shape)

        def advance(step: int, tokens: Tensor) -> Tensor:
            nonlocal features
            features = self._advance(tokens, features, blocks[step])
            return self._logits(features)

        return self._chain(batch, shape, self._logits(features), advance)

    def _advance(self, tokens: Tensor, features: Tensor, block: decoder.Block) -> Tensor:
        """One forward of the layer: the next features [N, H] from token ids int64 [N] and features
        [N, H].
        """
        x, qkv = self._enter(tokens, features)
        return self._leave(x, self._store(qkv, block.rotation, block.cells), block)

    def _store(self, qkv: Tensor, rotation: Tensor, cells: Tensor) -> Tensor:
        """Writes keys and values to the cache; returns queries [N, Nq, D]."""
        return decoder.store(self._config, self._layer, qkv, self._cache, 0, rotation, cells)

    def _leave(self, x: Tensor, queries: Tensor, block: decoder.Block) -> Tensor:
        """Features [N, H] from the layer's residual [N, H] and queries [N, Nq, D]."""
        attended = decoder.attend(self._config, queries, self._cache, 0, block)
        return decoder.finish_layer(self._layer, x, attended, self._config.rms_norm_eps)

    def _tree(
        self, batch: base.DraftBatch, features: Tensor, shape: base.DraftShape
    ) -> base.Drafts:
        """EAGLE-2's tree. A beam's rows are cached after the rows of earlier beams."""
        count = len(batch.slots)
        bases = torch.tensor(batch.lengths, device=self._device) - 1
        known = features[:, None]
        seen = torch.zeros(count, 1, 0, dtype=torch.bool, device=self._device)

        def expand(beam: net_drafter.Beam) -> Tensor:
            nonlocal known, seen
            width = beam.tokens.shape[1]
            rows = torch.arange(count, device=self._device)[:, None]
            own = torch.eye(width, dtype=torch.bool, device=self._device).expand(
                count, width, width
            )
            seen = torch.cat((seen[rows, beam.sources], own), dim=2)
            block = self._beam_block(batch, bases, beam, seen)
            tokens = self._token_ids(beam.tokens.flatten())
            known = self._advance(tokens, known[rows, beam.sources].flatten(0, 1), block).view(
                count, width, -1
            )
            return self._log_scores(batch, self._logits(known), beam.level)

        first = self._log_scores(batch, self._logits(features))
        drafts = net_drafter.grow_tree(first, expand, shape)
        return self._with_ids(drafts)

    def _beam_block(
        self, batch: base.DraftBatch, bases: Tensor, beam: net_drafter.Beam, seen: Tensor
    ) -> decoder.Block:
        """One row for each node of a beam; seen bool [B, k, W]: drafted rows visible to each node,
        including its own.
        """
        width, drafted = beam.tokens.shape[1], seen.shape[2]
        length = max(batch.lengths) - 1 + drafted
        stored = bases[:, None] + torch.arange(drafted - width, drafted, device=self._device)
        positions = (bases + beam.level - 1)[:, None].expand_as(stored)
        layout = decoder.Layout(stored, decoder.tree_visible(bases, seen, length))
        return self._masked_block(batch, positions, length, layout)

    def _feed(
        self, batch: base.DraftBatch, slots: Sequence[int], lengths: Sequence[int], rows: int
    ) -> tuple[Tensor, Tensor]:
        """See CachedDrafter; returns the residual [B, H] and the queries [B, Nq, D] of row n - 2.
        The outputs of earlier rows are not needed.
        """
        index, positions, states = self._known_rows(batch, slots, lengths, rows)
        tokens = batch.token_ids[index, positions + 1]
        x, qkv = self._enter(tokens.reshape(-1), self._true_features(states))
        rotation = self._rotation.index_select(0, positions.reshape(-1))[:, None]
        cells = self._cache.cells(index[:, 0], positions).reshape(-1)
        queries = self._store(qkv, rotation, cells)
        return x[rows - 1 :: rows], queries[rows - 1 :: rows]

    def _chain_blocks(self, batch: base.DraftBatch, steps: int) -> list[decoder.Block]:
        """Blocks of one token each at positions n - 2, n - 1, ..., planned together, since small
        operations dominate.
        """
        device, length = self._device, max(1, max(batch.lengths) - 2 + steps)
        positions = torch.tensor(batch.lengths, device=device)[:, None] + torch.arange(
            -2, steps - 2, device=device
        )
        positions.clamp_(min=0)
        whole = self._masked_block(batch, positions, length, decoder.RECTANGLE)
        count, group = len(batch.slots), self._config.group
        assert whole.mask is not None
        masks = whole.mask.view(count, 1, steps, group, length)
        cells = whole.cells.view(count, steps, -1)
        rotation = whole.rotation.view(count, steps, 1, -1)
        return [
            replace(
                whole,
                tokens=1,
                cells=cells[:, k].reshape(-1),
                rotation=rotation[:, k],
                mask=masks[:, :, k],
            )
            for k in range(steps)
        ]
