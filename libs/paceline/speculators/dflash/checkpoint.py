"""Reads and checks what a DFlash checkpoint holds, its block and its MASK with it.

Names are those of the published checkpoints, which SGLang's loader reads (fc.weight,
hidden_norm.weight, layers.0.self_attn.k_norm.weight, norm.weight, ...) and skips where it does not
know them: hence strict checks here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import ConfigError, InvalidInput
from paceline.models.config import ModelConfig, architecture, parse_config, read_count
from paceline.models.inner_layers import dflash_inner_layers
from paceline.models.loading import layer_shapes
from paceline.speculators.eagle import layer_config_json
from paceline.speculators.kinds import SPECULATORS
from paceline.speculators.net import check_fit

KIND = SPECULATORS["dflash"]
(ARCHITECTURE,) = KIND.architectures
LARGEST_BLOCK = 64

_VARIANTS = (
    *("conv_kernel_size", "selector_rank", "projector_type", "final_logit_softcapping"),
    *("attention_sink_bias", "attention_value_scale", "is_causal", "attention_bias"),
    *("has_embed_tokens", "has_lm_head"),
)
"""Switches of networks with other tensors or another block, all off in DFlash as first published.
"""


@dataclass(frozen=True, slots=True)
class DflashShape:
    """What a checkpoint fixes."""

    config: ModelConfig
    """Of a layer, and how many there are."""
    inner: tuple[int, ...]
    """The target's layers whose inputs it reads, ascending."""
    block_size: int
    """Tokens of a block, B: the last known one and B - 1 drafts."""
    mask_token_id: int
    """Row of the target's embedding that stands for a token to be drafted."""
    target_layers: int
    """Of the target it was made for."""


def drafter_shape(target: ModelConfig, layers: int) -> ModelConfig:
    """The layers' shape: the target's, as Qwen3 layers, whatever the target's family.

    Published checkpoints and loaders know no other ones.
    """
    return replace(
        target,
        family="qwen3",
        num_layers=layers,
        qkv_bias=False,
        output_bias=False,
        qk_norm=True,
        tie_word_embeddings=False,
        eos_token_ids=(),
    )


def default_mask(target: ModelConfig) -> int:
    """The highest id of the target's embedding that ends no sequence.

    There stand what tokenizers leave unused: reserved tokens (Llama 3), rows that fill up the table
    (Qwen), the byte 0xFF, which is in no UTF-8 text (tokenizers that end in bytes).
    """
    ids = range(target.vocab_size - 1, -1, -1)
    return next((one for one in ids if one not in target.eos_token_ids), 0)


def check_mask(mask_token_id: int, target: ModelConfig) -> None:
    """Raises InvalidInput unless it is a row of the target's embedding."""
    if not 0 <= mask_token_id < target.vocab_size:
        raise InvalidInput(
            "mask_token_id is no row of the target's embedding",
            seen=mask_token_id,
            allowed=f"0 to {target.vocab_size - 1}",
        )


def dflash_shapes(config: ModelConfig, states: int) -> dict[str, tuple[int, ...]]:
    """Every tensor name of a checkpoint whose context is made of so many states, and its shape."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, states * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for prefix in layer_prefixes(config):
        shapes |= layer_shapes(config, prefix)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
    return shapes


def layer_prefixes(config: ModelConfig) -> Iterator[str]:
    """What the tensors of each layer begin with."""
    return (f"layers.{index}." for index in range(config.num_layers))


def dflash_config_json(shape: DflashShape) -> dict[str, Any]:
    """config.json of a checkpoint; ids name the layer a state leaves: one less than it enters."""
    return layer_config_json(shape.config, ARCHITECTURE) | {
        "num_hidden_layers": shape.config.num_layers,
        "layer_types": ["full_attention"] * shape.config.num_layers,
        "num_target_layers": shape.target_layers,
        "block_size": shape.block_size,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": [entered - 1 for entered in shape.inner],
        },
    }


def parse_dflash(raw: Mapping[str, Any], target: ModelConfig) -> DflashShape:
    """What a config.json says.

    Raises InvalidInput naming the key that does not fit the target or asks for a variant that is
    not built here.
    """
    if (name := architecture(raw)) != ARCHITECTURE:
        raise InvalidInput("architectures is no DFlash drafter", seen=name, allowed=ARCHITECTURE)
    check_fit(raw, {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size})
    inside = raw.get("dflash_config") or {}
    if not isinstance(inside, dict):
        raise InvalidInput("dflash_config must be an object", seen=inside, allowed="an object")
    own = {**raw, **inside}
    for key in _VARIANTS:
        if own.get(key):
            raise InvalidInput(f"{key} is not supported in a DFlash drafter", seen=own[key])
    if own.get("num_target_layers", target.num_layers) != target.num_layers:
        raise InvalidInput(
            "num_target_layers of drafter and target differ",
            seen=own["num_target_layers"],
            allowed=target.num_layers,
        )

    mask = read_count(own, "mask_token_id", least=0)
    check_mask(mask, target)
    config = parse_config({**raw, "architectures": ["Qwen3ForCausalLM"]})
    return DflashShape(
        replace(config, max_position_embeddings=target.max_position_embeddings),
        _inner(raw, target),
        read_count(own, "block_size", least=2, most=LARGEST_BLOCK),
        mask,
        target.num_layers,
    )


def _inner(raw: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    try:
        return dflash_inner_layers(raw, target.num_layers)
    except ConfigError as error:
        raise error.within("target_layer_ids + 1") from error
