"""What the arithmetic of a round alone would take, beside the stages that the engine counts.

Owns no workload.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor
from torch.nn import functional

from paceline.models.config import ModelConfig
from rollout_gateway.engines.nouns import RoundSplit

STAGES = tuple(one.name for one in fields(RoundSplit) if one.name.endswith("_s"))
"""Stages of a round, as the engine counts their seconds."""

REPEATS = 15
SQUARE = 1024


def matmul_gflops(dtype: torch.dtype = torch.float32) -> float:
    """10^9 floating-point operations per second of a 1024 x 1024 x 1024 product with torch's
    threads.
    """
    a, b = torch.randn(SQUARE, SQUARE).to(dtype), torch.randn(SQUARE, SQUARE).to(dtype)
    return 2 * SQUARE**3 / _median_seconds(lambda: a @ b) / 1e9


def linear_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """[out, in] of every matrix a token passes, as the engine fuses them; the embedding is a
    lookup.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    layer = [
        (queries + config.kv_width, hidden),
        (hidden, queries),
        (2 * inner, hidden),
        (hidden, inner),
    ]
    return layer * config.num_layers + [(config.vocab_size, hidden)]


def flops_per_token(config: ModelConfig) -> int:
    """Two operations per weight of linear_shapes; attention itself is left out."""
    return 2 * sum(out * width for out, width in linear_shapes(config))


def linear_seconds(config: ModelConfig, rows: int) -> float:
    """Seconds of the model's matrix products alone on `rows` tokens, fp32, each matrix at its own
    place in memory.
    """
    pairs = [
        (torch.randn(rows, width), torch.randn(out, width)) for out, width in linear_shapes(config)
    ]

    def products() -> Tensor:
        for x, weight in pairs:
            out = functional.linear(x, weight)
        return out

    return _median_seconds(products)


@torch.inference_mode()
def _median_seconds(work: Callable[[], Tensor]) -> float:
    seconds = []
    for number in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        if number:  # the first warms up
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
