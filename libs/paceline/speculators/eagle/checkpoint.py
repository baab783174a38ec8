"""Reads and checks what an EAGLE checkpoint holds: names, shapes, config.json.

Names are those of SGLang's EAGLE loader (fc.weight, layers.0.self_attn.q_proj.weight, ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.errors import InvalidInput
from paceline.models.config import ARCHITECTURES as TARGETS
from paceline.models.config import ModelConfig, architecture, parse_config
from paceline.models.loading import layer_shapes
from paceline.speculators.kinds import SPECULATORS
from paceline.speculators.net import check_fit

KIND = SPECULATORS["eagle"]
ARCHITECTURES = dict(zip(TARGETS.values(), KIND.architectures, strict=True))
"""Family of the target -> architecture of its drafter."""
_TARGETS = {family: name for name, family in TARGETS.items()}


def eagle_shapes(config: ModelConfig, fc_bias: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor name of an EAGLE checkpoint and its shape."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (config.hidden_size, 2 * config.hidden_size)}
    if fc_bias:
        shapes["fc.bias"] = (config.hidden_size,)
    return shapes | layer_shapes(config, "layers.0.")


def strip_shared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the copies of the target's embed_tokens and lm_head, and without the "model." that
    some exporters write.

    SGLang's loader puts "model." before each name itself, so that checkpoints saved from its own
    modules carry it.
    """
    named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    return {
        name: t
        for name, t in named.items()
        if name not in ("embed_tokens.weight", "lm_head.weight")
    }


def eagle_config_json(config: ModelConfig, fc_bias: bool) -> dict[str, Any]:
    """config.json of an EAGLE checkpoint."""
    return layer_config_json(config, ARCHITECTURES[config.family]) | {"fc_bias": fc_bias}


def layer_config_json(config: ModelConfig, architecture: str) -> dict[str, Any]:
    """config.json of a drafter of one layer; max_position_embeddings is the target's: loaders clamp
    RoPE by it.
    """
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
        "architectures": [architecture],
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
    }


def check_eagle(raw: Mapping[str, Any], target: ModelConfig) -> None:
    """Raises InvalidInput naming the key in which a drafter's config.json does not fit its
    target.
    """
    name, allowed = architecture(raw), ARCHITECTURES[target.family]
    if name != allowed:
        raise InvalidInput(
            "architectures is not the drafter of the target's family", seen=name, allowed=allowed
        )
    check_one_layer(raw, target)


def check_one_layer(raw: Mapping[str, Any], target: ModelConfig) -> None:
    """Raises InvalidInput for a drafter of another width, vocabulary or depth."""
    check_fit(raw, {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size})
    layers = raw.get("num_hidden_layers", "(none)")
    if layers != 1:
        raise InvalidInput(
            "num_hidden_layers does not fit: this drafter has one layer", seen=layers, allowed=1
        )


def drafter_config(raw: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    """The drafter's own shape: its layer may differ from the target's in heads and widths."""
    return parse_config({**raw, "architectures": [_TARGETS[target.family]]})
