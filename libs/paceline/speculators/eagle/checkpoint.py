"""Writes and checks config.json of a drafter of one layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidInput
from paceline.models.config import ARCHITECTURES as TARGETS
from paceline.models.config import ModelConfig
from paceline.speculators.kinds import SPECULATORS
from paceline.speculators.net import check_fit

KIND = SPECULATORS["eagle"]
ARCHITECTURES = dict(zip(TARGETS.values(), KIND.architectures, strict=True))
"""Family of the target -> architecture of its drafter."""


def layer_config_json(config: ModelConfig, architecture: str) -> dict[str, Any]:
    """config.json of a drafter of one layer; max_position_embeddings is the target's, since loaders
    clamp RoPE by it.
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


def check_one_layer(raw: Mapping[str, Any], target: ModelConfig) -> None:
    """Raises InvalidInput for a drafter of another width, vocabulary or depth."""
    check_fit(raw, {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size})
    layers = raw.get("num_hidden_layers", "(none)")
    if layers != 1:
        raise InvalidInput(
            "num_hidden_layers does not fit: this drafter has one layer", seen=layers, allowed=1
        )
