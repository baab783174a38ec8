"""What a decoder-only checkpoint is shaped like, read from its config.json. Owns no tensors and imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import InvalidInput

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
"""Architecture name in config.json -> family."""

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: theta and how frequencies are scaled (Su et al. 2021; llama3 as in Llama 3.1)."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one decoder-only model."""

    family: str  # "llama" | "qwen2" | "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # bias of o_proj
    qk_norm: bool = False  # RMSNorm over head_dim on queries and keys (Qwen3)
    rope: RopeConfig = RopeConfig()
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InvalidInput(
                "num_attention_heads must be a multiple of num_key_value_heads",
                seen=f"{self.num_heads}, {self.num_kv_heads}",
            )
        if self.head_dim % 2:
            raise InvalidInput("head_dim must be even for rotary positions", seen=self.head_dim)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_width(self) -> int:
        """Numbers a token leaves in the cache per layer: keys and values of all KV heads."""
        return 2 * self.num_kv_heads * self.head_dim


def read_config(directory: Path) -> ModelConfig:
    """ModelConfig of a checkpoint directory in Hugging Face format.

    Raises InvalidInput when the directory or its config.json is missing or unreadable, or names a model not known here.
    """
    raw = read_config_json(directory)
    config = parse_config(raw)
    generation = directory / "generation_config.json"
    if generation.is_file() and not config.eos_token_ids:
        eos = _token_ids(json.loads(generation.read_text()).get("eos_token_id"))
        return parse_config({**raw, "eos_token_id": list(eos)})
    return config


def read_config_json(directory: Path) -> dict[str, Any]:
    """config.json as a dict. Raises InvalidInput when it is missing or no JSON object."""
    path = directory / "config.json"
    if not path.is_file():
        raise InvalidInput("not a checkpoint directory: it has no config.json", seen=directory)
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidInput(f"config.json is not JSON: {error}", seen=path) from error
    if not isinstance(raw, dict):
        raise InvalidInput("config.json must hold an object", seen=path)
    return raw


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a Hugging Face config mapping. Raises InvalidInput naming the key that is missing or wrong."""
    architectures = raw.get("architectures") or ["(none)"]
    family = ARCHITECTURES.get(architectures[0])
    if family is None:
        raise InvalidInput("unknown model architecture", seen=architectures[0], allowed=sorted(ARCHITECTURES))
    _reject_unsupported(raw)
    heads = _integer(raw, "num_attention_heads")
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=_integer(raw, "hidden_size"),
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=_integer(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or _integer(raw, "hidden_size") // heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        qk_norm=family == "qwen3",
        rope=_rope(raw),
        eos_token_ids=_token_ids(raw.get("eos_token_id")),
    )


def _reject_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("mlp_bias"):
        raise InvalidInput("mlp_bias is not supported", seen=True, allowed=False)
    if raw.get("hidden_act", "silu") != "silu":
        raise InvalidInput("unknown hidden_act", seen=raw["hidden_act"], allowed="silu")
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
        raise InvalidInput("sliding-window attention is not supported", seen="sliding", allowed="full_attention")


def _integer(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise InvalidInput(f"config.json needs a positive integer {key}", seen=value)
    return value


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)  # type: ignore[arg-type]


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes one `rope_parameters`; earlier versions `rope_theta` beside `rope_scaling`.
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise InvalidInput("unknown rope_type", seen=kind, allowed=ROPE_TYPES)
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_position=int(scaling.get("original_max_position_embeddings", 8192)),
    )
