"""Writes a Hugging Face checkpoint as a GGUF file, in the Python of llama.cpp's environment."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any


def write_gguf(model: Path, dtype: str, file: Path) -> None:
    """Write a checkpoint of the Llama or Qwen families as a GGUF file without a tokenizer.

    Matrices are F32, BF16 or, for int8, Q8_0; vectors stay F32. Raises ValueError for a model with
    scaled rotations.
    """
    gguf, numpy = import_module("gguf"), import_module("numpy")
    config = json.loads((model / "config.json").read_text())
    family, heads = config["model_type"], config["num_attention_heads"]
    kv_heads, layers = config.get("num_key_value_heads", heads), config["num_hidden_layers"]
    writer = gguf.GGUFWriter(file, family)
    _describe(writer, config)
    architecture = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(architecture, layers)
    kinds = gguf.GGMLQuantizationType
    matrix = {"float32": kinds.F32, "bfloat16": kinds.BF16, "int8": kinds.Q8_0}[dtype]
    for part in sorted(model.glob("*.safetensors")):
        for name, stored in import_module("gguf.utility").SafetensorsLocal(part).tensors.items():
            if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                continue
            tensor = gguf.dequantize(stored.mmap_bytes(), kinds[stored.dtype])
            tensor = tensor.reshape(stored.shape)
            count = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
            if family == "llama" and count:  # GGUF has the two halves of a head interleaved
                split = tensor.reshape(count, 2, -1, *tensor.shape[1:])
                tensor = split.swapaxes(1, 2).reshape(tensor.shape)
            kind = matrix if tensor.ndim > 1 else kinds.F32
            data = gguf.quantize(numpy.ascontiguousarray(tensor), kind)
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"no GGUF of a model with {rope['rope_type']} rotations")
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta", 10_000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
