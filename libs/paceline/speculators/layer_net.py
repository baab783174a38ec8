"""The parts of one decoder layer in a drafter's training, and the attention of a chain.

Each network defines the layer's input and the meaning of its output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import ConfigError, DataLoss, InvalidInput
from paceline.models import products, rope
from paceline.models.config import ModelConfig, architecture
from paceline.speculators import base, kinds, packed, vocabulary
from paceline.speculators.net import check_fit


class LayerNet(vocabulary.LimitedNet):
    """A drafter's network of decoder layers: see DraftNet."""

    inner: tuple[int, ...] = ()
    """Target layers whose inputs it reads; none: it reads the last state."""
    depth = 1
    """Number of its layers."""
    ahead = 0
    """Positions that it may write after the engine's longest sequence with drafts."""

    @property
    def capture(self) -> base.CaptureSpec:
        """See DraftNet.capture; the last state is the learning target at least."""
        return base.CaptureSpec(self.inner)

    @property
    def reads(self) -> base.CaptureSpec:
        """The states that it drafts from."""
        return base.CaptureSpec(self.inner, last=not self.inner)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., Vd] of its outputs [..., H]: those of the target's lm_head."""
        return products.linear_padded(states, self.drafted_head.to(states.dtype))

    def draft_logits(self, step: int, states: Tensor) -> Tensor:
        """See DraftNet.draft_logits."""
        return self.logits(states)

    def own_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See DraftNet.own_tensors; some exporters put "model." before each name."""
        named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        return {name: tensor for name, tensor in named.items() if name not in _SHARED}

    def shards(self) -> tuple[nn.Module, ...]:
        """See DraftNet.shards."""
        return tuple(getattr(self, "layers", ()))

    def attention(self) -> dict[str, object]:
        """Shape of the cache and the rotation for this network."""
        return {name: getattr(self.config, name) for name in _ATTENTION} | {
            "layers": self.depth,
            "ahead": self.ahead,
        }

    def states_read(self, row: packed.PackedRow) -> Tensor:
        """The states [T, .] that it reads, from captured rows.

        Raises DataLoss when the rows lack one.
        """
        hidden, names = self.config.hidden_size, row.layers.split(",")
        if row.states.shape[1] != len(names) * hidden:
            seen = f"{row.states.shape[1]} for {row.layers}"
            raise DataLoss("captured rows of another width", seen=seen, allowed=len(names) * hidden)
        return row.states[:, self.reads.columns(row.layers, hidden)]


_SHARED = ("embed_tokens.weight", "lm_head.weight")
_ATTENTION = (
    *("num_heads", "num_kv_heads", "head_dim", "qkv_bias", "output_bias", "qk_norm"),
    *("rms_norm_eps", "rope"),
)


Chain = list[tuple[Tensor, Tensor]]
"""Keys and values [B, kv_heads, T, head_dim] of the chain steps so far; the first step has true
states.
"""
Sight = tuple[Tensor, Tensor, Tensor | None, Chain | None]
"""Further arguments of Attention.forward: cos, sin, mask and chain."""


class Attention(nn.Module):
    """Grouped-query attention, with biases and head norms of the config's family."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        """width: numbers of an input, C."""
        super().__init__()
        self.config = config
        hidden, dim = config.hidden_size, config.head_dim
        kv_width, bias = config.num_kv_heads * dim, config.qkv_bias
        self.q_proj = products.Linear(width, config.num_heads * dim, bias=bias)
        self.k_proj = products.Linear(width, kv_width, bias=bias)
        self.v_proj = products.Linear(width, kv_width, bias=bias)
        self.o_proj = products.Linear(config.num_heads * dim, hidden, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, chain: Chain | None
    ) -> Tensor:
        """x [B, T, C]; cos, sin [B, 1, T, head_dim / 2]; mask bool [B, 1, T, T] or None for causal
        -> [B, T, H].
        """
        queries = self.queries(x, cos, sin)
        keys, values = self.keys_values(x, cos, sin)
        if chain is not None:
            chain.append((keys, values))
        if chain is not None and len(chain) > 1:
            out = chain_attention(queries, chain, mask)
        elif mask is None:
            out = functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=True
            )
        else:
            out = packed.packed_attention(queries, keys, values, mask)

        return self.o_proj(out.transpose(1, 2).flatten(2))

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries [B, heads, T, head_dim] of x [B, T, C]."""
        queries = self.q_proj(x).unflatten(-1, (-1, self.config.head_dim))
        if self.config.qk_norm:
            queries = self.q_norm(queries)
        return rope.rotate_halves(queries.transpose(1, 2), cos, sin).to(x.dtype)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, [B, kv_heads, T, head_dim] each, of x [B, T, C]."""
        keys, values = (
            project(x).unflatten(-1, (-1, self.config.head_dim))
            for project in (self.k_proj, self.v_proj)
        )
        if self.config.qk_norm:
            keys = self.k_norm(keys)
        keys = rope.rotate_halves(keys.transpose(1, 2), cos, sin).to(x.dtype)
        return keys, values.transpose(1, 2)


def chain_attention(queries: Tensor, chain: Chain, mask: Tensor | None) -> Tensor:
    """Attention of a later chain step: rows of true states up to its own, then its own earlier
    steps.

    queries [B, heads, T, D]; mask bool [B, 1, T, T] over the rows of true states, or None for
    causal. Query t sees keys of step 0 at rows <= t and, of every later step, row t only. Returns
    [B, heads, T, D].
    """
    if mask is None:
        rows = queries.shape[2]
        mask = torch.ones(1, 1, rows, rows, dtype=torch.bool, device=queries.device).tril()
    parts = [
        _chain_part(
            queries[:, :, a:b],
            [(keys[:, :, a:b], values[:, :, a:b]) for keys, values in chain],
            mask[:, :, a:b, a:b],
        )
        for a, b in pairwise(packed.edges(mask))
    ]
    return torch.cat(parts, dim=2)


def _chain_part(queries: Tensor, chain: Chain, mask: Tensor) -> Tensor:
    group, dim = queries.shape[1] // chain[0][0].shape[1], queries.shape[-1]
    keys, values = (
        [part.repeat_interleave(group, dim=1) for part in parts]
        for parts in zip(*chain, strict=True)
    )
    scores = (queries @ keys[0].transpose(-1, -2)).masked_fill(~mask, float("-inf"))
    own = [(queries * part).sum(-1, keepdim=True) for part in keys[1:]]
    weights = torch.softmax(torch.cat([scores, *own], dim=-1) / dim**0.5, dim=-1)
    first, *later = weights.split([scores.shape[-1], *(1 for _ in own)], dim=-1)
    out = first @ values[0]
    for weight, part in zip(later, values[1:], strict=True):
        out = out + weight * part
    return out


class SwiGlu(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = products.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = products.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = products.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, H] -> same shape."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary_angles(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, T, head_dim / 2] of positions int64 [B, T]."""
    angles = positions[:, None, :, None].float() * rope.inverse_frequencies(
        config.rope, config.head_dim
    ).to(positions.device)
    return angles.cos(), angles.sin()


@torch.no_grad()
def reset_weights(net: nn.Module, seed: int) -> None:
    """New weights: matrices normal(0, 0.02), norms 1, biases 0, in the order of the parameters."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        else:
            parameter.fill_(1.0)


def layer_config_json(config: ModelConfig, architecture: str) -> dict[str, Any]:
    """config.json of a drafter of one layer; max_position_embeddings is the target's: loaders clamp
    RoPE by it.
    """
    rope: dict[str, Any] = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    if config.rope.kind != "default":
        rope["factor"] = config.rope.factor
    if config.rope.kind == "llama3":
        rope |= {
            "low_freq_factor": config.rope.low_freq_factor,
            "high_freq_factor": config.rope.high_freq_factor,
            "original_max_position_embeddings": config.rope.original_max_position,
        }

    return {
        "architectures": [architecture],
        "model_type": config.family,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": config.output_bias,
        "tie_word_embeddings": False,
        "rope_theta": config.rope.theta,
        "rope_parameters": rope,
    }


def check_one_layer(raw: Mapping[str, Any], target: ModelConfig) -> None:
    """Raises InvalidInput for a drafter of another width, vocabulary or depth."""
    check_fit(raw, {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size})
    layers = raw.get("num_hidden_layers", "(none)")
    if layers != 1:
        message = "num_hidden_layers does not fit: this drafter has one layer"
        raise InvalidInput(message, seen=layers, allowed=1)


def open_config(
    raw: Mapping[str, Any], kind: kinds.SpeculatorKind, section: str, variants: Sequence[str]
) -> dict[str, Any]:
    """A checkpoint's config.json with the keys of its `section` at the top. Raises InvalidInput for
    another architecture, and for a switch among `variants` that is on.
    """
    (allowed,) = kind.architectures
    if (name := architecture(raw)) != allowed:
        raise InvalidInput(f"architectures is no {kind.name} drafter", seen=name, allowed=allowed)
    inside = raw.get(section) or {}
    if not isinstance(inside, dict):
        raise InvalidInput(f"{section} must be an object", seen=inside, allowed="an object")
    for key in variants:
        if on := raw.get(key) or inside.get(key):
            message = f"{key} is not supported in a drafter {kind.name}"
            raise InvalidInput(message, seen=on, allowed=False)
    return {**raw, **inside}


def inner_of(
    raw: Mapping[str, Any], kind: kinds.SpeculatorKind, target: ModelConfig, key: str
) -> tuple[int, ...]:
    """The target layers that a checkpoint names under `key` by their outputs. Raises ConfigError
    with the key.
    """
    try:
        return kind.inner_layers(raw, target.num_layers)
    except ConfigError as error:
        raise error.within(f"{key} + 1") from error


def drafter_shape(
    target: ModelConfig, family: Literal["llama", "qwen3"], layers: int
) -> ModelConfig:
    """The layers' shape: the target's, but as layers of the family that loaders support."""
    return replace(
        target,
        family=family,
        num_layers=layers,
        qkv_bias=False,
        output_bias=False,
        qk_norm=family == "qwen3",
        tie_word_embeddings=False,
        eos_token_ids=(),
    )
