"""Reads and checks a DFlash checkpoint, including its block size and MASK.

Names are the published names, which SGLang's loader reads (fc.weight, hidden_norm.weight,
layers.0.self_attn.k_norm.weight, norm.weight, ...). That loader skips unknown names, so the checks
here are strict.
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
"""Switches of networks with other tensors or another block; all are off in the published DFlash."""


@dataclass(frozen=True, slots=True)
class DflashShape:
    """The shape that a checkpoint fixes."""

    config: ModelConfig
    """Shape of a layer, and number of layers."""
    inner: tuple[int, ...]
    """The drafter reads the inputs of these target layers, ascending."""
    block_size: int
    """Tokens of a block, B: the last drawn token and B - 1 drafts."""
    mask_token_id: int
    """Row of the target's embedding in place of a token to be drafted."""
    target_layers: int
    """Number of layers of its target."""


def drafter_shape(target: ModelConfig, layers: int) -> ModelConfig:
    """The layers' shape: the target's, but always as Qwen3 layers.

    Published checkpoints and loaders support no other family.
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

    Tokenizers usually leave the last ids unused: reserved tokens (Llama 3), padding rows of the
    table (Qwen), or the byte 0xFF, which never occurs in UTF-8 text (tokenizers that end in bytes).
    """
    ids = range(target.vocab_size - 1, -1, -1)
    return next((one for one in ids if one not in target.eos_token_ids), 0)


def check_mask(mask_token_id: int, target: ModelConfig) -> None:
    """Raises InvalidInput for an id outside the target's embedding."""
    if not 0 <= mask_token_id < target.vocab_size:
        raise InvalidInput(
            "mask_token_id is no row of the target's embedding",
            seen=mask_token_id,
            allowed=f"0 to {target.vocab_size - 1}",
        )


def dflash_shapes(config: ModelConfig, states: int) -> dict[str, tuple[int, ...]]:
    """Every tensor name of a checkpoint with its shape; `states`: number of states in
    the context.
    """
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
    """Prefixes of the tensors of each layer."""
    return (f"layers.{index}." for index in range(config.num_layers))


def dflash_config_json(shape: DflashShape) -> dict[str, Any]:
    """config.json of a checkpoint. An id in it is the layer that outputs the state: one less than
    the layer that receives it.
    """
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
    """The shape in a config.json. Raises InvalidInput with the key that does not match the target
    or requests an unsupported variant.
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
