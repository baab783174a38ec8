"""Defines the sources of each served tensor in a checkpoint, and its transformation.

This is the first of two records for an update in place (Liu et al. 2025, FlashRL). The second is
the storages themselves (in_place.py). A transformation interleaves the heads of a tensor, joins
rows of several tensors, and rounds the result. Each step is defined here once; shapes, loading and
updates follow from it. Strides are contiguous throughout; dtypes are the permitted stored dtypes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import WeightsError
from paceline.models.config import ModelConfig
from paceline.models.profiles import Profile
from paceline.models.quantised import QuantisedMatrix, quantised
from paceline.models.rope import interleave


@dataclass(frozen=True, slots=True)
class LoadedTensor:
    """A tensor of a checkpoint, before any transformation."""

    name: str
    shape: tuple[int, ...]
    heads: int = 0
    """Heads with halves to interleave along the rows; 0: none."""
    repeated: int = 0
    """Number of rows that repeat this vector; 0: it is served once, unchanged."""

    @property
    def rows(self) -> int:
        """Number of rows of the result."""
        return self.repeated or self.shape[0]

    def turned(self, stored: Tensor) -> Tensor:
        """Its rows as served."""
        found = interleave(stored, self.heads) if self.heads else stored
        return found.expand(self.repeated, -1) if self.repeated else found


@dataclass(frozen=True, slots=True)
class ServedTensor:
    """A tensor that the forward reads, with its sources: rows of its parts, in order."""

    place: str
    """A field of DecoderWeights or, as `layers.<index>.<field>`, of LayerWeights."""
    parts: tuple[LoadedTensor, ...]
    rounded: bool = False
    """Whether a profile rounds it."""

    def built(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        profile: Profile | None,
    ) -> Tensor | QuantisedMatrix:
        """Its numbers in new memory. Raises as `quantised`, with the first part's name."""
        sizes = [part.rows for part in self.parts]
        # A drafter's layer may read wider inputs than its config states.
        first = tensors[self.parts[0].name].shape
        width = first if self.parts[0].repeated else first[1:]
        whole = torch.empty((sum(sizes), *width), dtype=dtype, device=device)
        for part, rows in zip(self.parts, whole.split(sizes), strict=True):
            rows.copy_(part.turned(tensors[part.name].detach()))
        if not self.rounded or profile is None:
            return whole
        try:
            return quantised(whole, profile)
        except WeightsError as error:
            raise error.within(self.parts[0].name) from error


def layer_records(config: ModelConfig, prefix: str, place: str = "") -> Iterator[ServedTensor]:
    """Records of one decoder layer. `prefix` (of names in the checkpoint) and `place` end with a
    dot, unless empty.
    """
    hidden, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": 0}
    widths = {"q": config.num_heads * dim, "k": config.kv_width // 2, "v": config.kv_width // 2}

    def attention(name: str, *shape: int, turned: int = 0, repeated: int = 0) -> LoadedTensor:
        return LoadedTensor(f"{prefix}self_attn.{name}", shape, turned, repeated)

    def mlp(name: str, *shape: int) -> LoadedTensor:
        return LoadedTensor(f"{prefix}mlp.{name}_proj.weight", shape)

    def fused(kind: str, *width: int) -> tuple[LoadedTensor, ...]:
        return tuple(
            attention(f"{one}_proj.{kind}", widths[one], *width, turned=heads[one]) for one in "qkv"
        )

    yield _norm(f"{place}input_norm", f"{prefix}input_layernorm", hidden)
    yield ServedTensor(f"{place}qkv", fused("weight", hidden), rounded=True)
    if config.qkv_bias:
        yield ServedTensor(f"{place}qkv_bias", fused("bias"))
    if config.qk_norm:
        norms = [
            attention(f"{one}_norm.weight", dim, turned=1, repeated=heads[one]) for one in "qk"
        ]
        yield ServedTensor(f"{place}qk_norm", tuple(norms))
    output = attention("o_proj.weight", hidden, widths["q"])
    yield ServedTensor(f"{place}output", (output,), rounded=True)
    if config.output_bias:
        yield ServedTensor(f"{place}output_bias", (attention("o_proj.bias", hidden),))
    yield _norm(f"{place}post_norm", f"{prefix}post_attention_layernorm", hidden)
    up = (mlp("gate", inner, hidden), mlp("up", inner, hidden))
    yield ServedTensor(f"{place}gate_up", up, rounded=True)
    yield ServedTensor(f"{place}down", (mlp("down", hidden, inner),), rounded=True)


def model_records(config: ModelConfig) -> Iterator[ServedTensor]:
    """All served tensors of a checkpoint; tied heads have only the embedding."""
    table = (config.vocab_size, config.hidden_size)
    yield ServedTensor("embed", (LoadedTensor("model.embed_tokens.weight", table),))
    for index in range(config.num_layers):
        yield from layer_records(config, f"model.layers.{index}.", f"layers.{index}.")
    yield _norm("norm", "model.norm", config.hidden_size)
    if not config.tie_word_embeddings:
        yield ServedTensor("head", (LoadedTensor("lm_head.weight", table),))


def _norm(place: str, name: str, width: int) -> ServedTensor:
    return ServedTensor(place, (LoadedTensor(f"{name}.weight", (width,)),))
