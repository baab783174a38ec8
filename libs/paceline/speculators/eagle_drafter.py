"""Drafting with an EAGLE network: its one-layer KV cache, catching up from true states, the drafts. Owns no training.

What drafting writes into the cache comes from the drafter's own features; the next catch-up overwrites those rows with
rows from true hidden states. So the drafter may be off for any number of rounds: the engine keeps the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import WeightsError
from paceline.models.cache import StaticCache, cache_rows
from paceline.models.config import ModelConfig
from paceline.models.decoder import (
    Block,
    DecoderWeights,
    LayerWeights,
    Layout,
    layer_forward,
    make_block,
    tree_visible,
)
from paceline.models.loading import fuse_layer, read_tensors
from paceline.models.rope import rotation_table
from paceline.speculators.base import CaptureSpec, DraftBatch, Drafts, DraftShape, SpeculatorSetup
from paceline.speculators.draft_tree import Beam, grow_tree
from paceline.speculators.eagle import EagleNet

LAG_ROWS = 8
"""A slot that lacks more rows than this catches up apart, so that the others do not compute its rows' padding."""


@dataclass(frozen=True, slots=True)
class EagleState:
    """One version of the drafter's weights, fused for inference."""

    net: EagleNet
    layer: LayerWeights
    fc_hidden: Tensor
    """[H, H]: the half of fc that reads the hidden state."""
    token_table: Tensor
    """[V, H]: fc's other half applied to every embedding, plus its bias."""


class EagleDrafter:
    """The speculator "eagle" (see speculators/base.py for the methods)."""

    name = "eagle"
    trainable = True
    capture = CaptureSpec()
    net: ClassVar[type[EagleNet]] = EagleNet

    def __init__(self, setup: SpeculatorSetup) -> None:
        self._target = setup.target
        self._dtype = setup.dtype
        target = setup.target.config
        net = self.net.read(setup.directory, target) if setup.directory else self.net(target, seed=setup.seed)
        self._config: ModelConfig = net.config
        device = setup.target.head.device
        self._device = device
        self._cache = StaticCache(
            self._config, layers=1, slots=setup.slots, capacity=setup.capacity, dtype=setup.dtype, device=device
        )
        self._rotation = rotation_table(self._config.rope, self._config.head_dim, setup.capacity).to(device)
        self._valid = [0] * setup.slots
        self._state = self._fused(net)

    def _fused(self, net: EagleNet) -> EagleState:
        device, hidden = self._device, self._config.hidden_size
        net.bind(self._target.embed, self._target.head)
        tensors = {name: value.detach() for name, value in net.state_dict().items()}
        fc = tensors["fc.weight"].to(device, self._dtype)
        bias = net.fc.bias.detach().to(device, self._dtype) if net.fc.bias is not None else None
        return EagleState(
            net=net,
            layer=fuse_layer(self._config, tensors, "layers.0.", self._dtype, device),
            fc_hidden=fc[:, hidden:].contiguous(),
            token_table=functional.linear(self._target.embed, fc[:, :hidden], bias),
        )

    def bind(self, target: DecoderWeights) -> None:
        """Use embed_tokens and lm_head of this target."""
        self._target = target
        self._state = self._fused(self._state.net)

    def load_state(self, directory: Path) -> EagleNet:
        """A version's weights, checked. Raises WeightsError, DataLoss or InvalidInput.

        A directory without config.json is of the shape that serves.
        """
        if not (directory / "config.json").is_file():
            net = self._state.net.twin()
            net.load_tensors(read_tensors(directory))
            return net
        net = self.net.read(directory, self._target.config)
        seen, serving = _attention(net.config), _attention(self._config)
        if seen != serving:
            message = f"drafter {directory}: its attention is not the serving one's"
            raise WeightsError(message, seen=seen, allowed=serving)
        return net

    def commit_state(self, state: object) -> None:
        """Serve what load_state returned; keys and values of the old weights stay until rows are rewritten."""
        assert isinstance(state, EagleNet)
        self._state = self._fused(state)

    def ended(self, batch: DraftBatch) -> None:
        """Learns from hidden states in its trainer, not from tokens."""

    def flush(self) -> None:
        """Keeps nothing of earlier sequences."""

    def free(self, slot: int) -> None:
        """Forget a slot."""
        self._valid[slot] = 0

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy what is kept of a sequence to another slot."""
        self._cache.move(source, destination, length)
        self._valid[destination] = self._valid[source]
        self._valid[source] = 0

    def propose(self, batch: DraftBatch, shape: DraftShape) -> Drafts:
        """The most likely chain or tree; see Speculator.propose."""
        self.catch_up(batch)
        lacking = max(n - 1 - self._valid[slot] for slot, n in zip(batch.slots, batch.lengths, strict=True))
        features = self._feed(batch, batch.slots, batch.lengths, max(lacking, 1))
        if shape.topk == 1:
            return self._chain(batch, features, shape)
        return self._tree(batch, features, shape)

    def _chain(self, batch: DraftBatch, features: Tensor, shape: DraftShape) -> Drafts:
        """The most likely token after each, or one drawn, from features [B, H] of the last true row."""
        blocks = self._chain_blocks(batch, shape.steps - 1)
        tokens: list[Tensor] = []
        scores: list[Tensor] = []
        for step in range(shape.steps):
            if step:
                x = self._inputs(tokens[-1], features)
                features = layer_forward(self._config, self._state.layer, x, self._cache, 0, blocks[step - 1])
            logits = functional.linear(features, self._target.head)
            shares = torch.softmax(logits, dim=-1)
            if batch.sampler is None:
                share, token = shares.max(dim=-1)
            else:
                token = batch.sampler(logits, step)
                share = shares.gather(1, token[:, None])[:, 0]
            tokens.append(token)
            scores.append(share if not step else scores[-1] * share)
            if shape.floor > 0 and bool(scores[-1].max() < shape.floor):
                break
        return Drafts(torch.stack(tokens, dim=1), torch.stack(scores, dim=1).float())

    def _tree(self, batch: DraftBatch, features: Tensor, shape: DraftShape) -> Drafts:
        """EAGLE-2's tree. A beam's rows stand in the cache behind those of the beams before it."""
        count = len(batch.slots)
        bases = torch.tensor(batch.lengths, device=self._device) - 1
        known = features[:, None]
        seen = torch.zeros(count, 1, 0, dtype=torch.bool, device=self._device)

        def expand(beam: Beam) -> Tensor:
            nonlocal known, seen
            width = beam.tokens.shape[1]
            rows = torch.arange(count, device=self._device)[:, None]
            own = torch.eye(width, dtype=torch.bool, device=self._device).expand(count, width, width)
            seen = torch.cat((seen[rows, beam.sources], own), dim=2)
            block = self._beam_block(batch, bases, beam, seen)
            x = self._inputs(beam.tokens.flatten(), known[rows, beam.sources].flatten(0, 1))
            known = layer_forward(self._config, self._state.layer, x, self._cache, 0, block).view(count, width, -1)
            return self._logprobs(known)

        return grow_tree(self._logprobs(features), expand, shape)

    def _logprobs(self, features: Tensor) -> Tensor:
        return torch.log_softmax(functional.linear(features, self._target.head).float(), dim=-1)

    def _beam_block(self, batch: DraftBatch, bases: Tensor, beam: Beam, seen: Tensor) -> Block:
        """One row for each node of a beam; seen bool [B, k, W]: the drafted rows each node sees, its own included."""
        width, drafted = beam.tokens.shape[1], seen.shape[2]
        length = max(batch.lengths) - 1 + drafted
        stored = bases[:, None] + torch.arange(drafted - width, drafted, device=self._device)
        positions = (bases + beam.level - 1)[:, None].expand_as(stored)
        layout = Layout(stored, tree_visible(bases, seen, length))
        return make_block(
            self._config, self._rotation, self._cache, cache_rows(batch.slots), positions, length, layout, masked=True
        )

    def catch_up(self, batch: DraftBatch) -> None:
        """Slots that lack more than LAG_ROWS rows get them."""
        late = [
            (slot, n)
            for slot, n in zip(batch.slots, batch.lengths, strict=True)
            if n - 1 - self._valid[slot] > LAG_ROWS
        ]
        if late:
            slots, lengths = [slot for slot, _ in late], [n for _, n in late]
            self._feed(batch, slots, lengths, max(n - 1 - self._valid[slot] for slot, n in late))

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        return torch.addmm(self._state.token_table.index_select(0, tokens), hidden, self._state.fc_hidden.t())

    def _feed(self, batch: DraftBatch, slots: Sequence[int], lengths: Sequence[int], rows: int) -> Tensor:
        """Rows n - 1 - rows .. n - 2 of every slot from true states; returns features of row n - 2, [B, H].

        Slots that lack fewer rows compute some again, with the same result: no padding and no masks of padding.
        """
        device = self._device
        last = torch.tensor(lengths, device=device) - 2
        # A sequence shorter than `rows` repeats row 0 at its front.
        positions = (last[:, None] + torch.arange(1 - rows, 1, device=device)).clamp_(min=0)
        index = torch.tensor(slots, device=device)[:, None]
        last_states = batch.hidden[..., -self._config.hidden_size :]
        hidden, tokens = last_states[index, positions], batch.token_ids[index, positions + 1]
        x = self._inputs(tokens.reshape(-1), hidden.reshape(-1, hidden.shape[-1]))
        block = make_block(
            self._config, self._rotation, self._cache, cache_rows(slots), positions, max(1, max(lengths) - 1)
        )
        out = layer_forward(self._config, self._state.layer, x, self._cache, 0, block)
        for slot, n in zip(slots, lengths, strict=True):
            self._valid[slot] = max(n - 1, 0)
        return out.view(len(slots), rows, -1)[:, -1]

    def _chain_blocks(self, batch: DraftBatch, steps: int) -> list[Block]:
        """Blocks of one token each at positions n - 1, n, ...: planned together, since small operations dominate."""
        if steps < 1:
            return []
        device, length = self._device, max(batch.lengths) - 1 + steps
        positions = torch.tensor(batch.lengths, device=device)[:, None] + torch.arange(-1, steps - 1, device=device)
        whole = make_block(
            self._config, self._rotation, self._cache, cache_rows(batch.slots), positions, length, masked=True
        )
        count, group = len(batch.slots), self._config.group
        assert whole.mask is not None
        masks = whole.mask.view(count, 1, steps, group, length)
        cells, rotation = whole.cells.view(count, steps, -1), whole.rotation.view(count, steps, 1, -1)
        return [
            replace(whole, tokens=1, cells=cells[:, k].reshape(-1), rotation=rotation[:, k], mask=masks[:, :, k])
            for k in range(steps)
        ]


def _attention(config: ModelConfig) -> dict[str, object]:
    """What a drafter's cache and rotation were made for."""
    names = ("num_heads", "num_kv_heads", "head_dim", "qkv_bias", "output_bias", "qk_norm", "rms_norm_eps", "rope")
    return {name: getattr(config, name) for name in names}
