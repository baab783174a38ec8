"""Makes updates of weights: by optimiser steps as in RL, or with a share of changed weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.tensors import NamedTensor, from_numpy

HIDDEN, INNER = 4096, 11008
LAYER = (*[(HIDDEN, HIDDEN)] * 4, *[(INNER, HIDDEN)] * 2, (HIDDEN, INNER), (HIDDEN,), (HIDDEN,))
"""Shapes of a layer of a Llama of 7B weights: 202 million."""
INITIAL_STD = 0.02
BETA_1, BETA_2, EPSILON, DECAY = 0.9, 0.999, 1e-8, 0.01
NOISE_STD = ((1 - BETA_1) / (1 + BETA_1)) ** 0.5
"""Standard deviation of the first moment of white gradients of variance 1, after many steps."""

Floats = npt.NDArray[np.float32]


def stepped(count: int, lr: float) -> tuple[list[NamedTensor], list[NamedTensor]]:
    """About `count` weights at 7B shapes as bf16, before and after a step of AdamW with white
    gradients.
    """
    rng = np.random.default_rng(0)
    old, new = [], []
    for number, shape in enumerate(_shapes(count)):
        weight = rng.standard_normal(shape, dtype=np.float32) * np.float32(INITIAL_STD)
        old.append(_bf16(number, weight))
        gradient = rng.standard_normal(shape, dtype=np.float32)
        first = rng.standard_normal(shape, dtype=np.float32) * np.float32(NOISE_STD)
        late_step(weight, gradient, first, lr)
        new.append(_bf16(number, weight))
    return old, new


def late_step(weight: Floats, gradient: Floats, first: Floats, lr: float) -> None:
    """AdamW's step of float32 weights (Loshchilov and Hutter 2019, algorithm 2), with second
    moments of 1.

    The step is so late that the corrections of its moments are 1. Changes weight and first moment.
    """
    first *= np.float32(BETA_1)
    first += np.float32(1 - BETA_1) * gradient
    second = np.float32(BETA_2) + np.float32(1 - BETA_2) * gradient * gradient
    weight -= np.float32(lr) * (
        first / (np.sqrt(second) + np.float32(EPSILON)) + np.float32(DECAY) * weight
    )


def moved(tensor: NamedTensor, share: float) -> npt.NDArray[np.uint16]:
    """The bits of a tensor with about `share` of its values, evenly spread, moved by one unit."""
    words = np.frombuffer(tensor.view, np.uint16).copy()
    rng = np.random.default_rng(len(words))
    at = rng.integers(0, len(words), int(share * len(words)))
    words[at] += 1
    return words.reshape(tensor.shape)


def all_moved(tensor: NamedTensor) -> npt.NDArray[np.uint16]:
    """The bits of a tensor with every value moved by one unit, as finite as before."""
    return (np.frombuffer(tensor.view, np.uint16) ^ np.uint16(1)).reshape(tensor.shape)


def _shapes(count: int) -> list[tuple[int, ...]]:
    """Shapes of layers; the last tensor has only its first rows."""
    shapes: list[tuple[int, ...]] = []
    while count > 0:
        shape = LAYER[len(shapes) % len(LAYER)]
        row = int(np.prod(shape[1:]))
        shapes.append((min(shape[0], -(-count // row)), *shape[1:]))
        count -= shapes[-1][0] * row
    return shapes


def _bf16(number: int, weight: Floats) -> NamedTensor:
    """Rounds to the nearest bfloat16, ties to even."""
    bits = weight.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16
    return from_numpy(f"layers.{number}.weight", rounded.astype(np.uint16), "BF16")
