"""Weight matrices in eight bits. Owns their numbers and their product; which matrices these are is
loading's choice.

Weight-only and symmetric: row n of W is values[n] * scales[n], activations stay as they are.
torchao chooses the scales and rounds, as its Int8WeightOnlyConfig does. Its tensor subclass is not
used: every product through it takes 10-20 us of Python dispatch, more than a whole product of a
small model (4 us), and never reaches the fused CPU kernel below.

Two products, timed on one core with AVX-512 against a plain matrix in bfloat16:
- bfloat16 and at most FUSED_ROWS rows: torch's fused kernel, which reads eight bits per weight.
  From 512 x 1408 on it
  takes 0.5-0.7 of the time for one row, 1.5 for eight rows in a warm cache. From about twelve rows
  on it loses to
- values in the activations' dtype, one product, scales on the result: costs a cast of the matrix
  per product. In float32 there is the second only; the fused kernel takes ten times as long there.
  A step of 8 layers of 512 x 1408, more than the caches hold: one row 9.9 -> 5.6 ms in float32, 8.0
  -> 3.4 ms in bfloat16; eight rows 16 -> 14, 11 -> 9. Where the weights fit into the caches float32
  gains nothing.

A row of the fused product is the same whatever rows stand beside it. The other product rounds like
a plain matrix: in float32 draws differ at near-ties only, in bfloat16 they may differ between batch
shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import ConfigError

EPSILON = torch.finfo(torch.float32).eps
"""Smallest scale: a row of zeros has one too."""
FUSED_ROWS = 8
"""Most rows of activations that the fused kernel gets."""


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A matrix W [N, K]; W[n, k] = values[n, k] * scales[n]."""

    values: Tensor
    """int8 [N, K]"""
    scales: Tensor
    """[N], the activations' dtype"""

    def product(self, x: Tensor) -> Tensor:
        """x W^T: [M, N] of activations x [M, K]."""
        if x.dtype == torch.bfloat16 and x.shape[0] <= FUSED_ROWS and x.device.type == "cpu":
            return torch._weight_int8pack_mm(x, self.values, self.scales)
        return functional.linear(x, self.values.to(x.dtype)).mul_(self.scales)


def quantized(weight: Tensor) -> Int8Matrix:
    """A matrix [N, K] in eight bits, each element within half a step (its row's scale) of where it
    was.

    Scales have the dtype of `weight`. Raises ConfigError when torchao is not installed.
    """
    try:
        from torchao.quantization import MappingType, choose_qparams_affine, quantize_affine
    except ImportError as error:
        raise ConfigError(
            "INT8 weights need torchao: pip install 'paceline[int8]'",
            seen=str(error),
            allowed="quantize = ''",
        ) from error

    exact, block = weight.float(), (1, weight.shape[1])
    wanted, zeros = choose_qparams_affine(
        exact,
        MappingType.SYMMETRIC,
        block,
        torch.int8,
        eps=EPSILON,
        scale_dtype=torch.float32,
        zero_point_dtype=torch.int32,
    )
    scales = _rounded_up(wanted, weight.dtype)
    values = quantize_affine(exact, block, scales.float(), zeros, torch.int8)
    return Int8Matrix(values, scales.view(-1))


def _rounded_up(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in another dtype, none smaller: a smaller one would cut off its row's largest
    weight.
    """
    near = scales.to(dtype)
    return torch.where(near < scales, torch.nextafter(near, torch.full_like(near, torch.inf)), near)
