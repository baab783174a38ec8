"""EAGLE-1 drafter as a module (Li et al. 2024, arXiv 2401.15077): one decoder layer that predicts the next feature.

Owns the network, for engine and trainer alike; not its checkpoint's names (eagle_checkpoint.py), not drafting with a
cache (eagle_drafter.py). embed_tokens and lm_head are the target's, by reference: never trained or exported.

Alignment: row t = (hidden h_t, embed(token t + 1)), embed first in the concatenation, rotary position t. Its output
predicts h_{t+1}; lm_head of it predicts token t + 2. h is the target's last hidden state after the final norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from paceline.config import Config
from paceline.models.config import ModelConfig
from paceline.models.rope import inverse_frequencies, rotate_halves
from paceline.speculators.base import CaptureSpec
from paceline.speculators.eagle_checkpoint import (
    ARCHITECTURES,
    check_eagle,
    drafter_config,
    eagle_config_json,
    eagle_shapes,
    strip_shared,
)
from paceline.speculators.losses import eagle_loss
from paceline.speculators.net import DraftNet, Objective
from paceline.speculators.packed import PackedRow, packed_attention


class EagleOptions(Config):
    """Settings of an EAGLE drafter."""

    fc_bias: bool = Field(default=False, description="a bias behind the fusion of embedding and state")
    feature_weight: float = Field(default=1.0, ge=0, description="weight of SmoothL1 on features")
    token_weight: float = Field(default=0.1, ge=0, description="weight of the soft cross-entropy on tokens")


@dataclass(slots=True)
class ChainKeys:
    """Keys and values of the chain steps so far, [B, kv_heads, T, head_dim] each; the first is that of true states."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class _HeadNorm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> same shape."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class EagleAttention(nn.Module):
    """Grouped-query attention of the target's family."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, dim = config.hidden_size, config.head_dim
        kv_width, bias = config.num_kv_heads * dim, config.qkv_bias
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_width, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_width, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = _HeadNorm(dim, config.rms_norm_eps)
            self.k_norm = _HeadNorm(dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, chain: ChainKeys | None) -> Tensor:
        """x [B, T, H]; cos, sin [B, 1, T, head_dim / 2]; mask bool [B, 1, T, T] or None for causal."""
        dim = self.config.head_dim
        queries, keys, values = (
            project(x).unflatten(-1, (-1, dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.config.qk_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = (rotate_halves(part.transpose(1, 2), cos, sin).to(x.dtype) for part in (queries, keys))
        values = values.transpose(1, 2)
        if chain is not None:
            chain.keys.append(keys)
            chain.values.append(values)
        if chain is not None and len(chain.keys) > 1:
            out = chain_attention(queries, chain, mask)
        elif mask is None:
            out = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        else:
            out = packed_attention(queries, keys, values, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def chain_attention(queries: Tensor, chain: ChainKeys, mask: Tensor | None) -> Tensor:
    """Attention of a later chain step: the rows of true states up to its own, then its own earlier steps.

    queries [B, heads, T, D]; mask bool [B, 1, T, T] over the rows of true states or None for causal. Query t sees keys
    of step 0 at rows <= t and, of every later step, only row t. Returns [B, heads, T, D].
    """
    group, dim = queries.shape[1] // chain.keys[0].shape[1], queries.shape[-1]
    keys = [part.repeat_interleave(group, dim=1) for part in chain.keys]
    values = [part.repeat_interleave(group, dim=1) for part in chain.values]
    rows = queries.shape[2]
    if mask is None:
        mask = torch.ones(rows, rows, dtype=torch.bool, device=queries.device).tril()
    scores = (queries @ keys[0].transpose(-1, -2)).masked_fill(~mask, float("-inf"))
    own = [(queries * part).sum(-1, keepdim=True) for part in keys[1:]]
    weights = torch.softmax(torch.cat([scores, *own], dim=-1) / dim**0.5, dim=-1)
    out = weights[..., :rows] @ values[0]
    for step, part in enumerate(values[1:]):
        out = out + weights[..., rows + step, None] * part
    return out


class EagleMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, H] -> same shape."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class EagleLayer(nn.Module):
    """One decoder layer of the target's family without input_layernorm; FSDP2 may shard it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = EagleAttention(config)
        self.mlp = EagleMlp(config)
        self.post_attention_layernorm = _HeadNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, chain: ChainKeys | None) -> Tensor:
        """x [B, T, H] -> same shape; see EagleAttention.forward for the rest."""
        x = x + self.self_attn(x, cos, sin, mask, chain)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleNet(DraftNet):
    """The drafter's network: see DraftNet."""

    speculator: ClassVar[str] = "eagle"
    architectures: ClassVar[frozenset[str]] = frozenset(ARCHITECTURES.values())
    Options: ClassVar[type[Config]] = EagleOptions

    def __init__(self, config: ModelConfig, options: EagleOptions | None = None, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.options = options or EagleOptions()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=self.options.fc_bias)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.reset(seed)

    @classmethod
    def fresh(cls, target: ModelConfig, options: Config, seed: int) -> Self:
        """See DraftNet.fresh."""
        assert isinstance(options, EagleOptions)
        return cls(target, options, seed=seed)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], target: ModelConfig, options: Config) -> Self:
        """See DraftNet.parse; `fc_bias` is the checkpoint's."""
        assert isinstance(options, EagleOptions)
        check_eagle(raw, target)
        options = options.model_copy(update={"fc_bias": bool(raw.get("fc_bias", False))})
        return cls(drafter_config(raw, target), options)

    def twin(self) -> Self:
        """See DraftNet.twin."""
        return type(self)(self.config, self.options)

    @property
    def capture(self) -> CaptureSpec:
        """See DraftNet.capture."""
        return CaptureSpec()

    def shards(self) -> tuple[nn.Module, ...]:
        """See DraftNet.shards."""
        return (self.layers[0],)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See DraftNet.shapes."""
        return eagle_shapes(self.config, self.options.fc_bias)

    def config_json(self) -> dict[str, Any]:
        """See DraftNet.config_json."""
        return eagle_config_json(self.config, self.options.fc_bias)

    def own_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See DraftNet.own_tensors."""
        return strip_shared(tensors)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Fresh weights: fc near "the next state is like this one", all other matrices normal(0, 0.02)."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
            else:
                parameter.fill_(1.0)
        self.fc.weight[:, self.config.hidden_size :] += torch.eye(self.config.hidden_size)

    def forward(self, row: PackedRow) -> Objective:
        """See DraftNet.forward and losses.eagle_loss."""
        features = self.features(self._last(row), row.next_tokens[None], row.positions[None], row.mask()[None])
        return eagle_loss(
            features[0],
            row.next_states,
            self.head,
            row.valid,
            feature_weight=self.options.feature_weight,
            token_weight=self.options.token_weight,
        )

    def chain_logits(self, row: PackedRow, steps: int) -> list[Tensor]:
        """See DraftNet.chain_logits."""
        chain = chain_features(
            self, self._last(row), row.next_tokens[None], row.positions[None], steps, row.mask()[None]
        )
        return [self.logits(features[0]) for features in chain]

    def _last(self, row: PackedRow) -> Tensor:
        """The last hidden state [1, T, H] of captured rows."""
        return row.states[None, :, -self.config.hidden_size :]

    def features(
        self,
        hidden: Tensor,
        next_tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        chain: ChainKeys | None = None,
    ) -> Tensor:
        """Predicted features: row t predicts h_{t+1}.

        hidden [B, T, H]: h_t; next_tokens int64 [B, T]: token t + 1; positions int64 [B, T]: t within its document;
        mask bool [B, T, T] (True where row i may see row j) or None for causal; chain: see chain_features.
        Returns [B, T, H].
        """
        embedded = functional.embedding(next_tokens, self.embed).to(hidden.dtype)
        x = self.fc(torch.cat((embedded, hidden), dim=-1))
        inverse = inverse_frequencies(self.config.rope, self.config.head_dim).to(hidden.device)
        angles = positions[:, None, :, None].float() * inverse
        seen = None if mask is None else mask[:, None]
        return self.layers[0](x, angles.cos(), angles.sin(), seen, chain)

    def logits(self, features: Tensor) -> Tensor:
        """lm_head of features [..., H] -> [..., V]."""
        return functional.linear(features, self.head.to(features.dtype))


def chain_features(
    net: EagleNet,
    hidden: Tensor,
    next_tokens: Tensor,
    positions: Tensor,
    steps: int,
    mask: Tensor | None = None,
) -> list[Tensor]:
    """Features of a draft chain from every row, teacher-forced on the true tokens (EAGLE-3's training-time test).

    Step 0 is net(hidden, ...). Step i reads the features of step i - 1 and token t + 1 + i at position t + i, and sees
    what the engine's drafter sees: true states of rows <= t and its own earlier steps. lm_head of step i predicts
    token t + 2 + i. While all earlier drafts equal the true tokens this is exactly the engine's chain.
    net is an EagleNet, sharded or not; arguments as in its forward. Returns `steps` tensors [B, T, H]; the last i rows
    of step i have no true token (id 0 stands in) and mean nothing.
    """
    chain = ChainKeys()
    features, tokens, outputs = hidden, next_tokens, []
    for step in range(steps):
        features = net.features(features, tokens, positions + step, mask, chain)
        outputs.append(features)
        tokens = functional.pad(tokens[:, 1:], (0, 1))
    return outputs
