"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864): frequencies, and both ways to apply
them.

Training applies it to the two halves of a head, as checkpoints store them. The engine stores query
and key heads with interleaved halves (`interleave`), so a rotation is one complex product.
"""

import math

import torch
from torch import Tensor

from paceline.models.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / config.theta**exponents
    if config.kind == "linear":
        return inverse / config.factor
    if config.kind == "llama3":
        return _llama3(inverse, config)
    return inverse


def _llama3(inverse: Tensor, config: RopeConfig) -> Tensor:
    # Long waves are stretched by `factor`, short waves kept, and waves in between blended linearly.
    wavelength = 2 * math.pi / inverse
    low = config.original_max_position / config.low_freq_factor
    high = config.original_max_position / config.high_freq_factor
    blend = (config.original_max_position / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blended = (1 - blend) * inverse / config.factor + blend * inverse
    scaled = torch.where(wavelength > low, inverse / config.factor, inverse)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, scaled)


def rotation_table(config: RopeConfig, head_dim: int, positions: int) -> Tensor:
    """exp(i * position * frequency), complex64 [positions, head_dim / 2]."""
    angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(config, head_dim))
    return torch.polar(torch.ones_like(angles), angles)


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads * head_dim, ...] with the two halves of each head interleaved: 0, d/2, 1, d/2 +
    1, ...
    """
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., head_dim] rotated; cos and sin broadcast to [..., head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
