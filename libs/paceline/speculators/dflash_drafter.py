"""Drafts with a DFlash network in the embedded engine: one forward for all drafts of a round.

Keys and values of the context are computed once per token and layer, and stay in the cache. During
drafting, the block's keys and values follow them in the cache. The next context rows overwrite the
part of the block that could still be visible.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import ConfigError
from paceline.models import cache, decoder, loading, products
from paceline.speculators import base, dflash, layer_drafter, net_drafter


class DflashDrafter(layer_drafter.CachedDrafter[dflash.DflashNet]):
    """The speculator "dflash"."""

    net = dflash.DflashNet

    def __init__(self, setup: base.SpeculatorSetup) -> None:
        """Raises the errors of CachedDrafter, and ConfigError when an arm drafts more tokens than a
        block has.
        """
        super().__init__(setup)
        if setup.steps > self._net.drafts:
            raise ConfigError(
                "an arm asks for more drafts than the checkpoint's block was trained for",
                seen=setup.steps,
                allowed=f"1 to {self._net.drafts} (block_size - 1)",
            )

    def _fuse(self, net: dflash.DflashNet) -> None:
        tensors = {name: value.detach() for name, value in net.state_dict().items()}
        self._fc, self._hidden_norm, self._norm = (
            tensors[f"{name}.weight"].to(self._device, self._dtype)
            for name in ("fc", "hidden_norm", "norm")
        )
        self._stack = tuple(
            loading.fuse_layer(self._config, tensors, prefix, self._dtype, self._device)
            for prefix in (f"layers.{index}." for index in range(self._config.num_layers))
        )
        heads, projections, norms = self._config.num_heads, [], []
        for layer in self._stack:
            assert isinstance(layer.qkv, Tensor)
            assert layer.qk_norm is not None
            projections.append(layer.qkv[heads * self._config.head_dim :])
            norms.append(layer.qk_norm[heads:])
        self._context = torch.cat(projections)  # to keys and values of all layers
        self._key_norms = torch.stack(norms)

    def propose(self, batch: base.DraftBatch, shape: base.DraftShape) -> base.Drafts:
        """The most likely token at each position, or a tree of the most likely tokens; at most B -
        1 levels. See Speculator.propose.
        """
        self.catch_up(batch)
        lacking = self._lacking(batch.slots, batch.lengths)
        if lacking > 0:
            self._feed(batch, batch.slots, batch.lengths, lacking)
        shape = replace(shape, steps=min(shape.steps, self._net.drafts))
        logits = products.linear(self._block_states(batch, shape.steps), self._target.head)
        if shape.topk > 1:
            return _tree(net_drafter.logprobs(logits), shape)
        if batch.sampler is not None:
            return self._chain(batch, shape, logits[:, 0], lambda step, tokens: logits[:, step])
        shares, tokens = torch.softmax(logits.float(), dim=-1).max(dim=-1)
        scores = shares.cumprod(dim=1)
        if shape.floor > 0:
            # The first level below the floor is still returned, as in drafters that stop there.
            kept = 1 + int((scores[:, :-1] >= shape.floor).any(0).sum())
            tokens, scores = tokens[:, :kept], scores[:, :kept]
        return base.Drafts(tokens, scores)

    def _block_states(self, batch: base.DraftBatch, steps: int) -> Tensor:
        """[B, steps, H]: the head's inputs at the first MASKs of every sequence's block."""
        net, device = self._net, self._device
        size, count = net.shape.block_size, len(batch.slots)
        bases = torch.tensor(batch.lengths, device=device) - 1
        length = max(batch.lengths) - 1 + size
        seen = torch.arange(length, device=device) < (bases + size)[:, None]
        block = decoder.make_block(
            self._config,
            self._rotation,
            self._cache,
            cache.cache_rows(batch.slots),
            bases[:, None] + torch.arange(size, device=device),
            length,
            decoder.Layout(visible=seen[:, None].expand(count, size, length)),
        )
        tokens = batch.token_ids.new_full((count, size), net.shape.mask_token_id)
        tokens[:, 0] = batch.token_ids[torch.tensor(batch.slots, device=device), bases]
        x = functional.embedding(tokens.view(-1), self._target.embed)
        for index, layer in enumerate(self._stack):
            x = decoder.layer_forward(self._config, layer, x, self._cache, index, block)
        return self._normed(x.view(count, size, -1)[:, 1 : steps + 1], self._norm)

    def _feed(
        self, batch: base.DraftBatch, slots: Sequence[int], lengths: Sequence[int], rows: int
    ) -> Tensor:
        """See CachedDrafter; returns the context [B R, H] of the given rows."""
        config = self._config
        index, positions, states = self._known_rows(batch, slots, lengths, rows)
        context = self._normed(products.linear(states, self._fc), self._hidden_norm)
        projected = products.linear(context, self._context).view(len(context), len(self._stack), -1)
        width = config.num_kv_heads * config.head_dim
        rotation = self._rotation[positions.flatten()][:, None, None]
        keys = projected[..., :width].unflatten(-1, (config.num_kv_heads, -1))
        decoder.rotate_heads(keys, self._key_norms, rotation, config.rms_norm_eps)
        cells = self._cache.cells(index[:, 0], positions).view(-1)
        for layer in range(len(self._stack)):
            self._cache.write(layer, cells, projected[:, layer])
        return context


def _tree(levels: Tensor, shape: base.DraftShape) -> base.Drafts:
    """EAGLE-2's tree of log-probs [B, steps, V], which are equal under all nodes of a level."""

    def expand(beam: net_drafter.Beam) -> Tensor:
        return levels[:, beam.level, None].expand(-1, beam.tokens.shape[1], -1)

    return net_drafter.grow_tree(levels[:, 0], expand, shape)
