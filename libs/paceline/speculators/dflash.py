"""Predicts a block of tokens by one forward from fused inner states of the target: DFlash (Chen et
al. 2026, arXiv 2602.06036).

Engine and trainer share the network. embed_tokens and lm_head are the target's, by reference: never
trained or exported.

Alignment: the context of anchor t is hidden_norm(fc(inner states)) of tokens 0 .. t at their own
positions. Its block has positions t + 1 .. t + B: token t + 1, then B - 1 times MASK. The output at
the k-th MASK is lm_head's input for token t + 1 + k. Queries are from the block alone. Keys and
values are from the context and the block; all positions of a block see each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from paceline.config import Config
from paceline.errors import ConfigError, InvalidInput
from paceline.models import decoder, products
from paceline.models.config import ModelConfig, parse_config, read_count
from paceline.speculators import base, kinds, layer_drafter, layer_net, net, net_drafter, packed
from paceline.speculators.vocabulary import LimitedOptions, of_size, with_tokens

KIND = kinds.SPECULATORS["dflash"]
(ARCHITECTURE,) = KIND.architectures
LARGEST_BLOCK = 64

_VARIANTS = (
    *("conv_kernel_size", "selector_rank", "projector_type", "final_logit_softcapping"),
    *("attention_sink_bias", "attention_value_scale", "is_causal", "attention_bias"),
    *("has_embed_tokens", "has_lm_head"),
)
"""Switches of networks with other tensors or another block; all are off in the published DFlash."""


@dataclass(frozen=True, slots=True)
class DflashShape:
    """The shape that a checkpoint fixes."""

    config: ModelConfig  # of a layer, with the number of layers
    inner: tuple[int, ...]  # target layers whose inputs it reads, ascending
    block_size: int  # tokens of a block, B: the last drawn token and B - 1 drafts
    mask_token_id: int  # row of the target's embedding in place of a token to be drafted
    target_layers: int


def default_mask(target: ModelConfig) -> int:
    """The highest id of the target's embedding that ends no sequence.

    Tokenizers usually leave the last ids unused: reserved tokens (Llama 3), padding rows of the
    table (Qwen), or the byte 0xFF, which never occurs in UTF-8 text (tokenizers that end in bytes).
    """
    ids = range(target.vocab_size - 1, -1, -1)
    return next((one for one in ids if one not in target.eos_token_ids), 0)


JUDGED_TOGETHER = 16
"""Blocks per forward of `chain_states`; few, so that its caller can pause between two forwards."""


class DflashOptions(LimitedOptions):
    """Settings of a DFlash drafter."""

    block_size: int = Field(default=8, ge=2, le=LARGEST_BLOCK)
    """Tokens of a block: the last known one and the drafts."""
    layers: int = Field(default=1, ge=1, le=64)
    """Decoder layers of the drafter."""
    inner_layers: tuple[int, ...] = ()
    """Decoder layers of the target whose inputs are read; none: 2, L/2 and L-3."""
    mask_token_id: int | None = Field(default=None, ge=0)
    """Row of the target's embedding that stands for a token to be drafted; none: the last one that
    ends no sequence.
    """
    targets: net.Targets = "distribution"
    """What a position learns: the policy's token, or the distribution it was drawn from."""
    gamma: float = Field(default=4.0, gt=0)
    """Draft k weighs exp(-(k - 1) / gamma) in the loss."""
    blocks_per_row: int = Field(default=128, ge=1)
    """Blocks learned from one row at most, drawn among its drafting targets."""


Angles = tuple[Tensor, Tensor]
"""cos and sin, see rotary_angles."""


class DflashLayer(nn.Module):
    """A Qwen3 layer with attention to a context and to its own block; FSDP2 may shard it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = layer_net.Attention(config, config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = layer_net.SwiGlu(config)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        of_blocks: Angles,
        of_context: Angles,
        parts: list[packed.Stretch],
    ) -> Tensor:
        """x [N, B, H] -> same shape; context [1, T, H]."""
        attention, normed = self.self_attn, self.input_layernorm(x)
        keys, values = attention.keys_values(context, *of_context)
        out = packed.block_attention(
            attention.queries(normed, *of_blocks),
            attention.keys_values(normed, *of_blocks),
            (keys[0], values[0]),
            parts,
        )
        x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class DflashNet(layer_net.LayerNet):
    """The drafter's network: see DraftNet."""

    kind: ClassVar[kinds.SpeculatorKind] = KIND
    Options: ClassVar[type[Config]] = DflashOptions

    def __init__(self, shape: DflashShape, options: DflashOptions, *, seed: int = 0) -> None:
        super().__init__()
        if not 0 <= shape.mask_token_id < shape.config.vocab_size:
            message = "mask_token_id is no row of the target's embedding"
            seen = shape.mask_token_id
            raise InvalidInput(message, seen=seen, allowed=f"0 to {shape.config.vocab_size - 1}")
        self.shape, self.config, self.options = shape, shape.config, options
        self.depth, self.ahead = shape.config.num_layers, shape.block_size
        self.inner = shape.inner
        hidden, eps = shape.config.hidden_size, shape.config.rms_norm_eps
        self.fc = products.Linear(len(shape.inner) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.layers = nn.ModuleList(DflashLayer(shape.config) for _ in range(self.depth))
        self.norm = nn.RMSNorm(hidden, eps=eps)
        layer_net.reset_weights(self, seed)

    @classmethod
    def fresh(cls, target: ModelConfig, options: DflashOptions, seed: int) -> Self:
        """See DraftNet.fresh.

        Raises ConfigError for a target with too few layers or without a requested layer,
        InvalidInput for a MASK outside its embedding.
        """
        mask = options.mask_token_id
        shape = DflashShape(
            layer_net.drafter_shape(target, "qwen3", options.layers),
            kinds.inner_layers(target.num_layers, options.inner_layers, "DFlash"),
            options.block_size,
            default_mask(target) if mask is None else mask,
            target.num_layers,
        )
        return with_tokens(cls(shape, options, seed=seed), target)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], target: ModelConfig, options: DflashOptions) -> Self:
        """See DraftNet.parse; the shape is the checkpoint's, the learning settings are the
        options'.

        Raises InvalidInput with the key that does not match the target or requests an unsupported
        variant, and for another block size than the checkpoint was trained for.
        """
        own = layer_net.open_config(raw, KIND, "dflash_config", _VARIANTS)
        net.check_fit(raw, {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size})
        if own.get("num_target_layers", target.num_layers) != target.num_layers:
            message = "num_target_layers of drafter and target differ"
            raise InvalidInput(message, seen=own["num_target_layers"], allowed=target.num_layers)
        config = parse_config({**raw, "architectures": ["Qwen3ForCausalLM"]})
        shape = DflashShape(
            replace(config, max_position_embeddings=target.max_position_embeddings),
            layer_net.inner_of(raw, KIND, target, "target_layer_ids"),
            read_count(own, "block_size", least=2, most=LARGEST_BLOCK),
            read_count(own, "mask_token_id", least=0),
            target.num_layers,
        )
        asked = options.block_size
        if "block_size" in options.model_fields_set and asked != shape.block_size:
            message = "block_size is not what the checkpoint was trained for"
            raise InvalidInput(message, seen=asked, allowed=shape.block_size)
        return of_size(cls(shape, options), raw)

    @property
    def drafts(self) -> int:
        """Drafts of a block, B - 1."""
        return self.shape.block_size - 1

    # ---- checkpoints

    def config_json(self) -> dict[str, Any]:
        """See DraftNet.config_json. An id in it is the layer that outputs the state: one less than
        the layer that receives it.
        """
        return layer_net.layer_config_json(self.config, ARCHITECTURE) | {
            "num_hidden_layers": self.depth,
            "layer_types": ["full_attention"] * self.depth,
            "num_target_layers": self.shape.target_layers,
            "block_size": self.shape.block_size,
            "dflash_config": {
                "mask_token_id": self.shape.mask_token_id,
                "target_layer_ids": [entered - 1 for entered in self.inner],
            },
            **self.vocabulary_json(),
        }

    # ---- learning

    def forward(self, row: packed.PackedRow) -> net.Objective:
        """See DraftNet.forward: sum over blocks and drafts k of exp(-(k - 1) / gamma) times the
        draft's cross-entropy (Chen et al. 2026, section on training).

        Blocks are at the row's drafting targets, at most blocks_per_row. A draft counts if the
        policy drew all tokens up to its own. Positions are the blocks. Terms: loss_0, loss_1, ...
        without weights, and the number of correct first drafts.
        """
        row, anchors = row.taught(self.head), self.anchors(row)
        blocks, places, drafts = self._taught(row, anchors)
        logits = self.logits(self.states(row, anchors)[blocks, drafts])
        losses, right = net.target_losses(logits, row, places, self.options.targets, self.draft_ids)
        weights = torch.exp(-drafts / self.options.gamma)
        sums = losses.new_zeros(self.drafts).index_add(0, drafts, losses.detach())
        terms = {f"loss_{draft}": one for draft, one in enumerate(sums)}
        terms["correct"] = right[drafts == 0].sum()
        return net.Objective((weights * losses).sum(), losses.new_tensor(len(anchors)), terms)

    def anchors(self, row: packed.PackedRow) -> Tensor:
        """int64 [N], ascending: positions of the learned blocks: all drafting targets of the row,
        or blocks_per_row of them by chance, seeded by its tokens: a repeated step learns the same.
        """
        found = row.valid.nonzero()[:, 0]
        most = self.options.blocks_per_row
        if len(found) <= most:
            return found
        seed = torch.Generator().manual_seed(int(row.next_tokens.sum()) + len(row))
        chosen = torch.randperm(len(found), generator=seed)[:most].sort().values
        return found[chosen.to(found.device)]

    def _taught(self, row: packed.PackedRow, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Three int64 [M]: block, position in draft_tokens of the drafted token, and number of the
        draft (0 for the first).
        """
        kept = torch.ones(len(anchors), dtype=torch.bool, device=anchors.device)
        blocks, places, drafts = [], [], []
        for draft in range(self.drafts):
            there, inside = row.ahead(draft)
            kept = kept & inside[anchors] & row.valid[there[anchors]]
            here = kept.nonzero()[:, 0]
            blocks.append(here)
            places.append(there[anchors[here]])
            drafts.append(torch.full_like(here, draft))
        return torch.cat(blocks), torch.cat(places), torch.cat(drafts)

    def chain_states(
        self, row: packed.PackedRow, steps: int
    ) -> Iterator[tuple[int, slice, Tensor]]:
        """See DraftNet.chain_states; at most B - 1 steps. A block reads none of its drafts, so no
        token is forced.
        """
        everywhere = torch.arange(len(row), device=row.next_tokens.device)
        for part in everywhere.split(JUDGED_TOGETHER):
            at = slice(int(part[0]), int(part[-1]) + 1)
            for step, states in enumerate(self.states(row, part)[:, :steps].unbind(1)):
                yield step, at, states

    def states(self, row: packed.PackedRow, anchors: Tensor) -> Tensor:
        """[N, B - 1, H]: lm_head's inputs at the MASKs of the blocks at anchors int64 [N]."""
        context = self.hidden_norm(self.fc(self.states_read(row)))[None]
        size, first = self.shape.block_size, row.positions[anchors] + 1
        tokens = row.next_tokens.new_full((len(anchors), size), self.shape.mask_token_id)
        tokens[:, 0] = row.next_tokens[anchors]
        positions = first[:, None] + torch.arange(size, device=first.device)
        x = functional.embedding(tokens, self.embed).to(context.dtype)
        of_blocks = layer_net.rotary_angles(self.config, positions)
        of_context = layer_net.rotary_angles(self.config, row.positions[None])
        parts = packed.stretches(row.mask()[anchors])
        for layer in self.layers:
            x = layer(x, context, of_blocks, of_context, parts)
        return self.norm(x[:, 1:])


class DflashDrafter(layer_drafter.CachedDrafter[DflashNet]):
    """The speculator "dflash": one forward for all drafts of a round.

    Keys and values of the context stay in the cache. The block's own follow them during drafting,
    until the next context rows overwrite them.
    """

    net = DflashNet

    def __init__(self, setup: base.SpeculatorSetup) -> None:
        """Raises the errors of CachedDrafter, and ConfigError when an arm drafts more tokens than a
        block has.
        """
        super().__init__(setup)
        if setup.steps > self._net.drafts:
            message = "an arm asks for more drafts than the checkpoint's block was trained for"
            allowed = f"1 to {self._net.drafts} (block_size - 1)"
            raise ConfigError(message, seen=setup.steps, allowed=allowed)

    def _fuse(self, net: DflashNet, tensors: Mapping[str, Tensor]) -> None:
        self._fc, self._hidden_norm, self._norm = (
            tensors[f"{name}.weight"].to(self._device, self._dtype)
            for name in ("fc", "hidden_norm", "norm")
        )
        self._stack = tuple(
            self._fused_layer(tensors, f"layers.{index}.")
            for index in range(self._config.num_layers)
        )
        heads, projections, norms = self._config.num_heads, [], []
        for layer in self._stack:
            assert isinstance(layer.qkv, Tensor)
            assert layer.qk_norm is not None
            projections.append(layer.qkv[heads * self._config.head_dim :])
            norms.append(layer.qk_norm[heads:])
        self._context = torch.cat(projections)  # to keys and values of all layers
        self._key_norms = torch.stack(norms)
        self._use_fast_products(self._stack, self._fc, self._context)

    def propose(self, batch: base.DraftBatch, shape: base.DraftShape) -> base.Drafts:
        """The most likely token at each position, or a tree of the most likely tokens; at most B -
        1 levels. See Speculator.propose.
        """
        self.catch_up(batch)
        lacking = self._lacking(batch.slots, batch.lengths)
        if lacking > 0:
            self._feed(batch, batch.slots, batch.lengths, lacking)
        shape = replace(shape, steps=min(shape.steps, self._net.drafts))
        logits = products.linear(self._block_states(batch, shape.steps), self._head)
        levels = self._log_scores(batch, logits, torch.arange(shape.steps, device=logits.device))
        if shape.topk > 1:  # log scores are equal under all nodes of a level
            width = min(shape.topk, levels.shape[-1])
            wide = levels[:, :, None].expand(-1, -1, width, -1)
            tree = net_drafter.grow_tree(levels[:, 0], lambda beam: wide[:, beam.level], shape)
            return self._with_ids(tree)
        shares, tokens = levels.max(dim=-1)
        scores = net_drafter.shares_of(shares.cumsum(dim=1))
        if shape.floor > 0:
            # The first level below the floor is still returned, as in drafters that stop there.
            kept = 1 + int((scores[:, :-1] >= shape.floor).any(0).sum())
            tokens, scores = tokens[:, :kept], scores[:, :kept]
        return self._with_ids(base.Drafts(tokens, scores))

    def _block_states(self, batch: base.DraftBatch, steps: int) -> Tensor:
        """[B, steps, H]: the head's inputs at the first MASKs of every sequence's block."""
        net, device = self._net, self._device
        size, count = net.shape.block_size, len(batch.slots)
        bases = torch.tensor(batch.lengths, device=device) - 1
        length = max(batch.lengths) - 1 + size
        seen = torch.arange(length, device=device) < (bases + size)[:, None]
        positions = bases[:, None] + torch.arange(size, device=device)
        layout = decoder.Layout(visible=seen[:, None].expand(count, size, length))
        block = self._masked_block(batch, positions, length, layout)
        tokens = batch.token_ids.new_full((count, size), net.shape.mask_token_id)
        tokens[:, 0] = batch.token_ids[torch.tensor(batch.slots, device=device), bases]
        x = self._embedded(tokens.view(-1))
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
