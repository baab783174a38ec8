"""The part of `sgl_kernel` that SGLang calls on the CPU, in plain torch. Owns no state.

SGLang finds most functions by import and the two attentions as `torch.ops.sgl_kernel.<name>`.
`convert_weight_packed` must stay absent: its presence makes SGLang use the AMX kernels of every
layer.
"""

from __future__ import annotations

import torch

from . import speculative
from .attention import decode_attention_cpu, extend_attention_cpu
from .cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from .tree import (
    build_draft_decode_metadata_cpu,
    build_tree_kernel_efficient_cpu,
    verify_tree_greedy_cpu,
)

__version__ = "0.4.7+paceline.cpu"

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "speculative",
    "verify_tree_greedy_cpu",
]

for _operation in (decode_attention_cpu, extend_attention_cpu):
    setattr(torch.ops.sgl_kernel, _operation.__name__, _operation)
