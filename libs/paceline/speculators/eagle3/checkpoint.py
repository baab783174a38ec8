"""Reads and checks an EAGLE-3 checkpoint, including its inner states and draft vocabulary.

Names are from SGLang's EAGLE-3 loader (fc.weight, midlayer.mlp.up_proj.weight, ...). That loader
silently skips unknown names, so the checks here are strict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ConfigError, InvalidInput, WeightsError
from paceline.models.config import ModelConfig, architecture, parse_config
from paceline.models.inner_layers import INNER_STATES, eagle3_inner_layers
from paceline.models.loading import layer_shapes
from paceline.speculators.eagle import check_one_layer
from paceline.speculators.kinds import SPECULATORS

KIND = SPECULATORS["eagle3"]
(ARCHITECTURE,) = KIND.architectures
MAP_DTYPES = {"d2t": torch.int64, "t2d": torch.bool}
"""The draft vocabulary's two tensors; all other tensors are weights."""

_VARIANTS = (
    *("bias", "fc_norm", "use_aux_norm", "norm_before_fc", "norm_output"),
    *("attention_bias", "mlp_bias", "tie_word_embeddings"),
)
"""Switches of networks with other tensors or another recurrence; all are off in the published
EAGLE-3.
"""


def drafter_shape(target: ModelConfig) -> ModelConfig:
    """The layer's shape: the target's, but always as a Llama layer.

    Loaders support no other family.
    """
    return replace(
        target,
        family="llama",
        num_layers=1,
        qkv_bias=False,
        output_bias=False,
        qk_norm=False,
        tie_word_embeddings=False,
    )


def eagle3_shapes(config: ModelConfig, draft_vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Every tensor name of an EAGLE-3 checkpoint and its shape."""
    hidden = config.hidden_size
    shapes = layer_shapes(config, "midlayer.")
    for name in "qkv":
        weight = f"midlayer.self_attn.{name}_proj.weight"
        shapes[weight] = (shapes[weight][0], 2 * hidden)
    return shapes | {
        "fc.weight": (hidden, INNER_STATES * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab_size, hidden),
        "d2t": (draft_vocab_size,),
        "t2d": (config.vocab_size,),
    }


def parse_eagle3(
    raw: Mapping[str, Any], target: ModelConfig
) -> tuple[ModelConfig, tuple[int, ...], int]:
    """The layer's shape, the inner states and the draft vocabulary's size of a config.json. Raises
    InvalidInput with the key that does not match the target or requests an unsupported variant.
    """
    if (name := architecture(raw)) != ARCHITECTURE:
        raise InvalidInput(
            "architectures is not an EAGLE-3 drafter", seen=name, allowed=ARCHITECTURE
        )

    check_one_layer(raw, target)
    inside = raw.get("eagle_config") or {}
    if not isinstance(inside, dict):
        raise InvalidInput("eagle_config must be an object", seen=inside, allowed="an object")
    for key in _VARIANTS:
        if raw.get(key) or inside.get(key):
            raise InvalidInput(
                f"{key} is not supported in an EAGLE-3 drafter", seen=True, allowed=False
            )

    if inside.get("use_aux_hidden_state") is False:
        raise InvalidInput("use_aux_hidden_state is not supported", seen=False, allowed=True)
    if raw.get("target_hidden_size", target.hidden_size) != target.hidden_size:
        raise InvalidInput(
            "target_hidden_size differs", seen=raw["target_hidden_size"], allowed=target.hidden_size
        )

    size = raw.get("draft_vocab_size")
    if type(size) is not int or not 0 < size <= target.vocab_size:
        allowed = f"1 to {target.vocab_size}: the rows of its own lm_head"
        raise InvalidInput(
            "draft_vocab_size", seen="(none)" if size is None else size, allowed=allowed
        )

    config = parse_config({**raw, "architectures": ["LlamaForCausalLM"]})
    return (
        replace(config, max_position_embeddings=target.max_position_embeddings),
        _inner(raw, target),
        size,
    )


def _inner(raw: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    try:
        return eagle3_inner_layers(raw, target.num_layers)
    except ConfigError as error:
        raise error.within("eagle_aux_hidden_state_layer_ids + 1") from error


def frequent_tokens(counts: Tensor, size: int) -> Tensor:
    """The most frequent tokens: int64 [size] token ids, ascending. Among equal counts the lower id
    is chosen.

    counts int64 [V]: how often each token was a drafting target. Raises InvalidInput.
    """
    if counts.dim() != 1 or counts.dtype != torch.int64 or bool((counts < 0).any()):
        raise InvalidInput(
            "counts of tokens",
            seen=f"{counts.dtype} {tuple(counts.shape)}",
            allowed="int64 [V], >= 0",
        )
    if not 0 < size <= len(counts):
        raise InvalidInput("size of a draft vocabulary", seen=size, allowed=f"1 to {len(counts)}")
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def token_maps(token_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """d2t int64 [Vd], offsets: token id = draft id + d2t[draft id]; and t2d bool [V]. Both are from
    ascending ids [Vd].
    """
    draft_ids = torch.arange(len(token_ids), device=token_ids.device)
    drafted = torch.zeros(vocab_size, dtype=torch.bool, device=token_ids.device)
    drafted[token_ids] = True
    return token_ids - draft_ids, drafted


def check_maps(d2t: Tensor, t2d: Tensor) -> None:
    """Raises WeightsError when d2t leaves the vocabulary, is not ascending, or
    disagrees with t2d.
    """
    token_ids = d2t + torch.arange(len(d2t), device=d2t.device)
    outside = token_ids[(token_ids < 0) | (token_ids >= len(t2d))]
    if len(outside):
        raise WeightsError(
            "d2t names a token outside the vocabulary",
            seen=int(outside[0]),
            allowed=f"< {len(t2d)}",
        )

    if bool((token_ids.diff() <= 0).any()):
        raise WeightsError(
            "d2t is not ascending", seen=token_ids[:8].tolist(), allowed="ascending token ids"
        )

    if not torch.equal(token_maps(token_ids, len(t2d))[1], t2d):
        raise WeightsError(
            "t2d and d2t name other tokens",
            seen=f"t2d: {int(t2d.sum())} tokens",
            allowed=f"the {len(d2t)} of d2t",
        )
