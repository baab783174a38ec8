"""The documented draw in plain Python and numpy: the oracle of every engine's tokens."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int, token: int) -> float:
    """u(s, t, v)."""
    key = _mix((_mix((seed + _GOLDEN) & _MASK) + position * _GOLDEN) & _MASK)
    return ((_mix((key + (token + 1) * _GOLDEN) & _MASK) >> 11) + 0.5) * 2.0**-53


def gumbel(seed: int, position: int, vocab: int) -> npt.NDArray[np.float64]:
    """Noise of all tokens at one position, [V]."""
    return np.array(
        [-math.log(-math.log(uniform(seed, position, token))) for token in range(vocab)]
    )


def draw(
    logits: npt.NDArray[np.float32], temperature: float, seed: int, position: int
) -> tuple[int, float]:
    """(token, behavior log-prob) from logits [V]."""
    scaled = logits.astype(np.float64) / (temperature or 1.0)
    logprobs = scaled - (scaled.max() + math.log(np.exp(scaled - scaled.max()).sum()))
    noise = gumbel(seed, position, len(logits)) if temperature else 0.0
    token = int(np.argmax(logprobs + noise))
    return token, float(logprobs[token])
