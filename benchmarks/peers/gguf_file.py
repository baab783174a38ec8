"""Writes a Hugging Face checkpoint as a GGUF file, in the Python of llama.cpp's environment."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

_PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""A checkpoint's names and GGUF's."""


def write_gguf(model: Path, dtype: str, file: Path) -> None:
    """Write a checkpoint of the Llama or Qwen families as a GGUF file without a tokenizer.

    Matrices are F32, BF16 or, for int8, Q8_0; vectors stay F32. Raises ValueError for a model with
    scaled rotations.
    """
    gguf, numpy = import_module("gguf"), import_module("numpy")
    config = json.loads((model / "config.json").read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"no GGUF of a model with {rope['rope_type']} rotations")
    family, heads = config["model_type"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    width = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(file, family)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta", 10_000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    kinds = gguf.GGMLQuantizationType
    matrix = {"float32": kinds.F32, "bfloat16": kinds.BF16, "int8": kinds.Q8_0}[dtype]
    for name, tensor in _tensors(model):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        count = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
        if family == "llama" and count:  # GGUF has the two halves of a head interleaved
            split = tensor.reshape(count, 2, -1, *tensor.shape[1:])
            tensor = split.swapaxes(1, 2).reshape(tensor.shape)
        kind = matrix if tensor.ndim > 1 else kinds.F32
        data = gguf.quants.quantize(numpy.ascontiguousarray(tensor), kind)
        writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, part = module.split(".", 3)
        return f"blk.{layer}.{_PARTS[part]}.{kind}"
    return f"{_PARTS[module]}.{kind}"


def _tensors(model: Path) -> Any:
    """Yield the names and float32 arrays of a checkpoint's safetensors files."""
    numpy = import_module("numpy")
    for file in sorted(model.glob("*.safetensors")):
        data = numpy.memmap(file, numpy.uint8, "r")
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        for name, one in json.loads(data[8:start].tobytes()).items():
            if name == "__metadata__":
                continue
            low, high = (start + offset for offset in one["data_offsets"])
            if one["dtype"] == "BF16":
                whole = data[low:high].view("<u2").astype("<u4") << 16
                array = whole.view("<f4")
            else:
                array = data[low:high].view({"F32": "<f4", "F16": "<f2"}[one["dtype"]])
            yield name, array.astype("<f4").reshape(one["shape"])
