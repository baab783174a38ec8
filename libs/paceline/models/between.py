"""What is between two attentions of a decoder, as one compiled graph: a layer's finish_layer and
the following one's project_inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from paceline.models.config import ModelConfig
from paceline.models.decoder import Between, LayerWeights, finish_layer, project_inputs
from paceline.models.graphs import ROWS, GraphSpec, compiled


@dataclass(frozen=True, slots=True)
class LayerSpec(GraphSpec):
    """Shape of a layer, of which a graph holds all but the attention."""

    hidden: int
    attended: int
    """Nq D"""
    projected: int
    """(Nq + 2 Nkv) D"""
    intermediate: int
    eps: float
    input_norm: bool
    qkv_bias: bool
    output_bias: bool
    dtype: str

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, **more: Any) -> Self:
        """Of the layers of a model; `more`: what else a graph is made for."""
        heads = config.num_heads + 2 * config.num_kv_heads
        about = {"input_norm": True, **more}
        return cls(
            hidden=config.hidden_size,
            attended=config.num_heads * config.head_dim,
            projected=heads * config.head_dim,
            intermediate=config.intermediate_size,
            eps=config.rms_norm_eps,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            dtype=str(dtype).removeprefix("torch."),
            **about,
        )

    def ones(self, *size: int) -> Tensor:
        """For an example."""
        return torch.ones(size, dtype=getattr(torch, self.dtype))

    def rows(self) -> list[Tensor]:
        """What a layer adds to [ROWS, H] and what its attention gave [ROWS, Nq D]: an example."""
        return [self.ones(ROWS, self.hidden), self.ones(ROWS, self.attended)]

    def parts(self) -> list[Tensor]:
        """Those of `parts_of`, as an example."""
        hidden, inner = self.hidden, self.intermediate
        return [
            self.ones(hidden, self.attended),
            self.ones(hidden),
            self.ones(2 * inner, hidden),
            self.ones(hidden, inner),
            self.ones(self.projected, hidden),
            *([self.ones(hidden)] if self.input_norm else []),
            *([self.ones(self.projected)] if self.qkv_bias else []),
            *([self.ones(hidden)] if self.output_bias else []),
        ]

    def layer(self, parts: Sequence[Tensor]) -> LayerWeights:
        """What has its end from one layer and its beginning from another: see parts_of."""
        output, post_norm, gate_up, down, qkv, *others = parts
        given = iter(others)
        return LayerWeights(
            input_norm=next(given) if self.input_norm else None,
            qkv=qkv,
            qkv_bias=next(given) if self.qkv_bias else None,
            qk_norm=None,
            output=output,
            output_bias=next(given) if self.output_bias else None,
            post_norm=post_norm,
            gate_up=gate_up,
            down=down,
        )


def parts_of(layer: LayerWeights, following: LayerWeights) -> list[Any]:
    """Of a layer what comes behind its attention, of the following one what comes before."""
    always = [layer.output, layer.post_norm, layer.gate_up, layer.down, following.qkv]
    others = (following.input_norm, following.qkv_bias, layer.output_bias)
    return [*always, *(one for one in others if one is not None)]


@dataclass(frozen=True, slots=True)
class BetweenSpec(LayerSpec):
    """What is between two layers' attentions."""

    def module(self) -> nn.Module:
        """See GraphSpec.module."""
        return _BetweenLayers(self)

    def example(self) -> tuple[list[Tensor], list[Tensor]]:
        """See GraphSpec.example."""
        return self.rows(), self.parts()


class _BetweenLayers(nn.Module):
    def __init__(self, spec: BetweenSpec) -> None:
        super().__init__()
        self._spec = spec

    def forward(self, x: Tensor, attended: Tensor, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        """x and queries, keys and values of the following layer."""
        layer, eps = self._spec.layer(parts), self._spec.eps
        x = finish_layer(layer, x, attended, eps)
        return x, project_inputs(layer, x, eps)


def compiled_between(config: ModelConfig, dtype: torch.dtype) -> Between | None:
    """The graph of a model; None where it cannot be compiled. Raises ConfigError: see compiled."""
    graph = compiled(BetweenSpec.of(config, dtype))
    if graph is None:
        return None

    def between(
        layer: LayerWeights, following: LayerWeights, x: Tensor, attended: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, qkv = graph([x, attended, *parts_of(layer, following)])
        return x, qkv

    return between
