"""Weights of one draft of a recurrent drafter, its norm and its stacks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.models.products import linear

NORM_EPS = 1e-6


class NormPair(NamedTuple):
    """Weight and bias of a norm, [width] or [1]."""

    weight: Tensor
    bias: Tensor


class Layer(NamedTuple):
    """One further layer of a stack: norm, GELU, matrix [out, in]."""

    norm: NormPair
    matrix: Tensor


@dataclass(frozen=True, slots=True)
class StepWeights:
    """Weights of one draft. A cell has G gates of width P; P is D unless proj_dim or emb_dim is
    set.
    """

    proj: Tensor
    """[G P, H] for the first draft, [G P, D] for later drafts."""
    embeds: tuple[Tensor, ...]
    """[V, P] for each gate, or one table for all gates."""
    norms: tuple[NormPair, ...]
    """Norms of the cell."""
    head: Tensor
    """[V, D]"""
    embed_stack: tuple[Layer, ...] = ()
    """Stack after the embedding."""
    proj_stack: tuple[Layer, ...] = ()
    """Stack after proj."""
    inner: tuple[Tensor, ...] = ()
    """The cell's matrices between its norms."""


class BiasedNorm(nn.Module):
    """Weight and bias of `biased_norm`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))


def biased_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x / sqrt(mean x² + 1e-6) * weight + bias over the last dimension of x [N, D]; no mean is
    subtracted.

    A single weight applies to all of x, and a single x to every weight: its mean is the same when
    repeated.
    """
    if x.shape[-1] != len(weight):
        width = max(x.shape[-1], len(weight))
        x, weight = x.expand(-1, width), weight.expand(width)
    return functional.rms_norm(x, weight.shape, weight, NORM_EPS) + bias


def stacked(x: Tensor, layers: Iterable[Layer]) -> Tensor:
    """The output of a stack for x [N, width]."""
    for norm, matrix in layers:
        x = linear(functional.gelu(biased_norm(x, *norm)), matrix)
    return x
