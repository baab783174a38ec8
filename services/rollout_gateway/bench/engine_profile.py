"""Where the milliseconds of a round go, and what the arithmetic alone would take. Owns clocks, not workloads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.models.config import ModelConfig
from rollout_gateway.engines.embedded import engine as engine_module
from rollout_gateway.engines.embedded.engine import EmbeddedEngine
from rollout_gateway.engines.embedded.prefill import Prefill
from rollout_gateway.engines.embedded.speculative import Speculation

STAGES: dict[str, Sequence[tuple[Any, str]]] = {
    "prefill": ((Prefill, "run"),),
    "draft": ((Speculation, "parts"), (Speculation, "draft")),
    "forward": ((EmbeddedEngine, "_forward"), (engine_module, "head_logits")),
    "verify": ((engine_module, "verify"),),
    "accept": ((EmbeddedEngine, "_accept"), (EmbeddedEngine, "_emit")),
}
"""Stage -> the functions it consists of; none calls another of the table."""

REPEATS = 15
SQUARE = 1024


@contextmanager
def stage_seconds() -> Iterator[dict[str, float]]:
    """Seconds per stage of every engine that steps within the block; costs a microsecond or two a call."""
    spent = dict.fromkeys(STAGES, 0.0)
    usual = [(owner, name, getattr(owner, name)) for places in STAGES.values() for owner, name in places]
    try:
        for stage, places in STAGES.items():
            for owner, name in places:
                setattr(owner, name, _timed(getattr(owner, name), spent, stage))
        yield spent
    finally:
        for owner, name, function in usual:
            setattr(owner, name, function)


def _timed(function: Callable[..., Any], spent: dict[str, float], stage: str) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **kwargs)
        spent[stage] += time.perf_counter() - began
        return result

    return timed


def matmul_gflops(dtype: torch.dtype = torch.float32) -> float:
    """10^9 floating-point operations per second of a 1024 x 1024 x 1024 product with torch's threads."""
    a, b = torch.randn(SQUARE, SQUARE).to(dtype), torch.randn(SQUARE, SQUARE).to(dtype)
    return 2 * SQUARE**3 / _median_seconds(lambda: a @ b) / 1e9


def linear_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """[out, in] of every matrix a token passes, as the engine fuses them; the embedding is a lookup."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    layer = [(queries + config.kv_width, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]
    return layer * config.num_layers + [(config.vocab_size, hidden)]


def flops_per_token(config: ModelConfig) -> int:
    """Two operations per weight of linear_shapes; attention itself is left out."""
    return 2 * sum(out * width for out, width in linear_shapes(config))


def linear_seconds(config: ModelConfig, rows: int) -> float:
    """Seconds of the model's matrix products alone on `rows` tokens, fp32, each matrix at its own place in memory."""
    pairs = [(torch.randn(rows, width), torch.randn(out, width)) for out, width in linear_shapes(config)]

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
