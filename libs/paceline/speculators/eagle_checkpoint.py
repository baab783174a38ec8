"""EAGLE checkpoints on disk and on the wire: names, shapes, config.json. Owns no network and no training state.

Names are those of SGLang's EAGLE loader (fc.weight, layers.0.self_attn.q_proj.weight, ...).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import InvalidInput, WeightsError
from paceline.models.config import ModelConfig, architecture, parse_config, read_config_json
from paceline.models.loading import check_tensors, layer_shapes, read_tensors
from paceline.speculators.eagle import EagleNet

ARCHITECTURES = {
    "llama": "LlamaForCausalLMEagle",
    "qwen2": "Qwen2ForCausalLMEagle",
    "qwen3": "Qwen3ForCausalLMEagle",
}
_TARGETS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def eagle_shapes(config: ModelConfig, fc_bias: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor name of an EAGLE checkpoint and its shape."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (config.hidden_size, 2 * config.hidden_size)}
    if fc_bias:
        shapes["fc.bias"] = (config.hidden_size,)
    return shapes | layer_shapes(config, "layers.0.")


def export_tensors(net: EagleNet, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Tensors to push or save, detached, on the CPU; dtype None keeps theirs. The net must not be sharded."""
    tensors = {name: value.detach().cpu() for name, value in net.state_dict().items()}
    check_tensors(tensors, eagle_shapes(net.config, net.fc_bias))
    return {name: (value.to(dtype) if dtype else value).contiguous() for name, value in tensors.items()}


def load_tensors(net: EagleNet, tensors: Mapping[str, Tensor]) -> None:
    """Copies a checkpoint's tensors into the net. Raises WeightsError naming what is missing, extra or misshapen."""
    named = strip_shared(tensors)
    check_tensors(named, eagle_shapes(net.config, net.fc_bias))
    net.load_state_dict(named)


def strip_shared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the copies of the target's embed_tokens and lm_head that some exporters write."""
    return {n: t for n, t in tensors.items() if n not in ("embed_tokens.weight", "lm_head.weight")}


def eagle_config_json(config: ModelConfig, fc_bias: bool) -> dict[str, Any]:
    """config.json of an EAGLE checkpoint; max_position_embeddings is the target's, since loaders clamp RoPE by it."""
    rope: dict[str, Any] = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    if config.rope.kind != "default":
        rope["factor"] = config.rope.factor
    if config.rope.kind == "llama3":
        rope |= {
            "low_freq_factor": config.rope.low_freq_factor,
            "high_freq_factor": config.rope.high_freq_factor,
            "original_max_position_embeddings": config.rope.original_max_position,
        }
    return {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": config.output_bias,
        "tie_word_embeddings": False,
        "rope_theta": config.rope.theta,
        "rope_parameters": rope,
        "fc_bias": fc_bias,
    }


def save_eagle(net: EagleNet, directory: Path, dtype: torch.dtype | None = None) -> None:
    """Writes model.safetensors and config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(export_tensors(net, dtype), directory / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(eagle_config_json(net.config, net.fc_bias), indent=2)
    (directory / "config.json").write_text(text + "\n")


def load_eagle(directory: Path, target: ModelConfig) -> EagleNet:
    """An EagleNet from a checkpoint directory, checked against the target it is to draft for.

    Raises InvalidInput (no checkpoint, a config.json that does not fit the target), WeightsError or DataLoss, each
    naming the directory.
    """
    raw = read_config_json(directory)
    try:
        _check_fit(raw, target)
        net = EagleNet(drafter_config(raw, target), fc_bias=bool(raw.get("fc_bias", False)))
        load_tensors(net, read_tensors(directory))
    except (InvalidInput, WeightsError) as error:
        raise type(error)(f"drafter {directory}: {error.message}", seen=error.seen, allowed=error.allowed) from error
    return net


def _check_fit(raw: Mapping[str, Any], target: ModelConfig) -> None:
    """Raises InvalidInput naming the key in which a drafter's config.json does not fit its target."""
    name, allowed = architecture(raw), ARCHITECTURES[target.family]
    if name != allowed:
        raise InvalidInput("architectures is not the drafter of the target's family", seen=name, allowed=allowed)
    for key, expected in (("vocab_size", target.vocab_size), ("hidden_size", target.hidden_size)):
        if raw.get(key) != expected:
            raise InvalidInput(f"{key} of drafter and target differ", seen=raw.get(key, "(none)"), allowed=expected)
    layers = raw.get("num_hidden_layers", "(none)")
    if layers != 1:
        raise InvalidInput("num_hidden_layers does not fit: this drafter has one layer", seen=layers, allowed=1)


def drafter_config(raw: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    """The drafter's own shape: its layer may differ from the target's in heads and widths."""
    return parse_config({**raw, "architectures": [_TARGETS[target.family]]})
