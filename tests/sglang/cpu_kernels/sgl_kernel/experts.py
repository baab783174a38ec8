"""The experts of a layer that one rank holds.

Replaces SGLang's own torch code for the CPU, `sglang.srt.layers.moe.fused_moe_native`, which does
not support experts on other ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def moe_forward_native(layer: Any, x: Tensor, topk_output: Any, config: Any) -> Tensor:
    """Sum of the chosen experts' outputs [T, H] for x [T, H], each times its weight. An id of -1 is
    an expert of another rank, which adds its own there.
    """
    if config.activation != "silu" or config.apply_router_weight_on_input:
        raise NotImplementedError(f"experts with {config.activation}, weights on the input")
    weights, ids, _ = topk_output
    out = torch.zeros_like(x)
    for expert, (into, outof) in enumerate(zip(layer.w13_weight, layer.w2_weight, strict=True)):
        rows, places = (ids == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(x[rows], into).chunk(2, dim=-1)
        said = functional.linear(functional.silu(gate) * up, outof)
        out.index_add_(0, rows, said * weights[rows, places, None].to(said.dtype))
    return out
