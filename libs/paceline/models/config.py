"""The shape of a decoder-only checkpoint, read from its config.json.

The module has no tensors and imports no torch.
"""

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, InvalidInput
from paceline.models import reading

_FACTS = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
ARCHITECTURES: dict[str, str] = _FACTS["architectures"]
EXPERT_ARCHITECTURES: dict[str, str] = _FACTS["expert_architectures"]
DEFAULTS: dict[str, dict[str, int]] = _FACTS["defaults"]
WITHOUT_EFFECT: dict[str, list[object]] = _FACTS["without_effect"]
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW, FULL_LAYERS = 4096, 28
"""Defaults of absent sliding_window and max_window_layers, as in transformers."""
MAX_COUNT, MAX_LAYERS = 2**31 - 1, 4096
"""Largest count and number of layers in a config.json: larger values belong to no model and take
too long to process.
"""

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: theta and the scaling of frequencies (Su et al. 2021; llama3 as in
    Llama 3.1).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one decoder-only model."""

    family: str  # "llama" | "qwen2" | "qwen3" | "qwen3_moe"
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
    experts: int = 0  # of a layer, instead of its MLP; 0: the layer has an MLP
    experts_per_token: int = 0
    expert_size: int = 0  # intermediate_size of one expert

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            message = "num_attention_heads must be a multiple of num_key_value_heads"
            seen = f"{self.num_heads}, {self.num_kv_heads}"
            allowed = f"num_key_value_heads that divides {self.num_heads}"
            raise InvalidInput(message, seen=seen, allowed=allowed)
        if self.head_dim < 2 or self.head_dim % 2:
            message = "head_dim must be even for rotary positions"
            raise InvalidInput(message, seen=self.head_dim, allowed="2, 4, ...")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_width(self) -> int:
        """Numbers per token and layer in the cache: keys and values of all KV heads."""
        return 2 * self.num_kv_heads * self.head_dim


def read_config(directory: Path, *, experts: bool = False) -> ModelConfig:
    """ModelConfig of a checkpoint directory in Hugging Face format. `experts`: also for a model
    with experts in its layers. Its end tokens come from `reading.end_tokens`.

    Raises InvalidInput when the directory or its config.json is missing or unreadable, or names an
    unknown model.
    """
    raw = read_config_json(directory)
    try:
        raw["eos_token_id"] = [one.token_id for one in reading.end_tokens(directory)]
        return parse_config(raw, experts=experts)
    except InvalidInput as error:
        raise error.within(directory) from error


def check_model(directory: Path) -> None:
    """Raises ConfigError unless the directory has the config.json of a supported model.

    Also raises it if the tokenizer has more tokens than the model has rows.
    """
    try:
        raw = read_config_json(directory)
        name = architecture(raw)
    except InvalidInput as error:
        message = f"model is no Hugging Face directory: {error.message}"
        raise ConfigError(message, seen=directory) from error
    if name not in ARCHITECTURES:
        message = f"the model of {directory} is not known here"
        raise ConfigError(message, seen=name, allowed=", ".join(ARCHITECTURES))
    reading.check_vocabulary(reading.read_text(directory), raw.get("vocab_size"))


def read_config_json(directory: Path) -> dict[str, Any]:
    """config.json as a dict. Raises InvalidInput when it is missing or no JSON object."""
    path = directory / "config.json"
    if not path.is_file():
        raise InvalidInput("not a checkpoint directory: it has no config.json", seen=directory)
    return reading.read_object(path)


def architecture(raw: Mapping[str, Any]) -> str:
    """The architecture named in a config.json.

    Raises InvalidInput when `architectures` is no list with one name.
    """
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        message = "architectures must be a list with one name"
        raise InvalidInput(message, seen=_shown(names), allowed="a list")
    return names[0]


def parse_config(raw: Mapping[str, Any], *, experts: bool = False) -> ModelConfig:
    """ModelConfig of a Hugging Face config mapping; `experts` as in read_config.

    Raises InvalidInput naming the key that is missing or wrong.
    """
    name = architecture(raw)
    known = ARCHITECTURES | (EXPERT_ARCHITECTURES if experts else {})
    family = known.get(name)
    if family is None:
        message = "architectures names a model not known here"
        raise InvalidInput(message, seen=name, allowed=sorted(known))

    _reject_unsupported(raw)
    raw = {**DEFAULTS[family], **raw}
    _reject_windows(raw)
    heads = read_count(raw, "num_attention_heads")
    attention_bias = read_flag(raw, "attention_bias")
    return ModelConfig(
        family=family,
        vocab_size=read_count(raw, "vocab_size"),
        hidden_size=read_count(raw, "hidden_size"),
        intermediate_size=read_count(raw, "intermediate_size"),
        num_layers=read_count(raw, "num_hidden_layers", most=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=read_count(raw, "num_key_value_heads", heads),
        head_dim=read_count(raw, "head_dim", read_count(raw, "hidden_size") // heads),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        max_position_embeddings=read_count(raw, "max_position_embeddings"),
        tie_word_embeddings=read_flag(raw, "tie_word_embeddings"),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        rope=_rope(raw),
        eos_token_ids=reading.token_ids(raw.get("eos_token_id")),
        **(_experts(raw) if family in EXPERT_ARCHITECTURES.values() else {}),
    )


def _experts(raw: Mapping[str, Any]) -> dict[str, int]:
    """Number of experts of a layer, number per token, and size of one."""
    # transformers 5 writes num_local_experts, earlier versions num_experts
    count = "num_experts" if "num_experts" in raw else "num_local_experts"
    experts = read_count(raw, count)
    return {
        "experts": experts,
        "experts_per_token": read_count(raw, "num_experts_per_tok", most=experts),
        "expert_size": read_count(raw, "moe_intermediate_size"),
    }


def _reject_unsupported(raw: Mapping[str, Any]) -> None:
    for key, neutral in WITHOUT_EFFECT.items():
        value = raw.get(key)
        if value is not None and value not in neutral:
            allowed = ", ".join(map(str, neutral)) or "none"
            raise InvalidInput(f"{key} is not supported", seen=value, allowed=allowed)


def _reject_windows(raw: Mapping[str, Any]) -> None:
    """Raises InvalidInput if a layer sees less than a whole sequence.

    As in transformers for Qwen2 and Qwen3: without layer_types, the layers from max_window_layers
    on have the window. All layers are full if the window is null or switched off.
    """
    layers = read_count(raw, "num_hidden_layers", most=MAX_LAYERS)
    window = None
    if read_flag(raw, "use_sliding_window") and raw.get("sliding_window", 0) is not None:
        window = read_count(raw, "sliding_window", WINDOW)
    types = raw.get("layer_types")
    if types is None:
        full = layers if window is None else read_count(raw, "max_window_layers", FULL_LAYERS, 0)
        types = [FULL] * min(full, layers) + [SLIDING] * (layers - full)
    elif not isinstance(types, list) or len(types) != layers:
        message = "layer_types must be a list with one name a layer"
        raise InvalidInput(message, seen=types, allowed=layers)

    positions = read_count(raw, "max_position_embeddings")
    for kind in types:
        if kind == SLIDING and window is not None and window < positions:
            message = "sliding_window is not supported where it is shorter than a sequence"
            allowed = f"max_position_embeddings, {positions}, or more; or only {FULL} layers"
            raise InvalidInput(message, seen=window, allowed=allowed)
        if kind != FULL and (kind != SLIDING or window is None):
            raise InvalidInput("layer_types is not supported", seen=kind, allowed=FULL)


def _shown(value: object) -> object:
    """A value in the form for an error."""
    return "(none)" if value is None else value


def read_count(
    raw: Mapping[str, Any],
    key: str,
    default: int | None = None,
    least: int = 1,
    most: int = MAX_COUNT,
) -> int:
    """An integer of a config.json. Raises InvalidInput naming the key."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not least <= value <= most:
        message = f"{key} must be a whole number"
        raise InvalidInput(message, seen=_shown(value), allowed=f"{least} to {most}")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 < value <= sys.float_info.max
    ):
        raise InvalidInput(f"{key} must be a positive number", seen=_shown(value), allowed="> 0")
    return float(value)


def read_flag(raw: Mapping[str, Any], key: str) -> bool:
    """A boolean of a config.json, false if absent. Raises InvalidInput naming the key."""
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidInput(f"{key} must be true or false", seen=value, allowed="true, false")
    return bool(value)


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes one `rope_parameters`; earlier versions `rope_theta` beside
    # `rope_scaling`.
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling = raw.get(key) or {}
    if not isinstance(scaling, dict):
        message = f"{key} must be an object"
        raise InvalidInput(message, seen=scaling, allowed="an object with rope_type")

    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise InvalidInput("unknown rope_type", seen=kind, allowed=ROPE_TYPES)
    _reject_unsupported(scaling)
    rope = RopeConfig(
        theta=_number(scaling, "rope_theta", _number(raw, "rope_theta", 10_000.0)), kind=kind
    )
    if kind == "default":
        return rope
    # No defaults here: a scaled model without its own factors would return plausible nonsense.
    rope = replace(rope, factor=_number(scaling, "factor"))
    if kind == "linear":
        return rope
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if high <= low:
        message = "high_freq_factor must be above low_freq_factor"
        raise InvalidInput(message, seen=high, allowed=f"> {low}")

    original = read_count(scaling, "original_max_position_embeddings")
    return replace(rope, low_freq_factor=low, high_freq_factor=high, original_max_position=original)
