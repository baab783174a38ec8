"""Fields missing in config.json take transformers' defaults; unimplemented values are rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)

from paceline.errors import InvalidInput
from paceline.models.config import WITHOUT_EFFECT, parse_config

ORACLES: dict[str, Any] = {
    "LlamaForCausalLM": LlamaConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
}
LEAST = {
    "vocab_size": 99,
    "hidden_size": 2048,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
}


@pytest.mark.parametrize("architecture", ORACLES)
def test_an_absent_key_means_what_transformers_takes_it_for(architecture: str) -> None:
    ours = parse_config({**LEAST, "architectures": [architecture]})
    theirs = ORACLES[architecture](**LEAST)
    head_dim = getattr(theirs, "head_dim", None) or 2048 // 32
    assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, head_dim)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_a_null_number_of_key_value_heads_is_that_of_heads(architecture: str) -> None:
    raw = {**LEAST, "num_attention_heads": 16, "num_key_value_heads": None}
    theirs = ORACLES[architecture](**raw)
    ours = parse_config({**raw, "architectures": [architecture]})
    assert ours.num_kv_heads == theirs.num_key_value_heads == 16


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_a_key_that_changes_the_mathematics_is_refused_by_name(key: str) -> None:
    raw = {**LEAST, "architectures": ["LlamaForCausalLM"]}
    for value in (None, *WITHOUT_EFFECT[key]):
        assert parse_config({**raw, key: value}) == parse_config(raw)
    for value in (0.5, [1, 0], 30.0):
        with pytest.raises(InvalidInput, match=f"{key} is not supported; seen"):
            parse_config({**raw, key: value})


MODELS: dict[str, Any] = {
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}
SMALL = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 12,
}
SLIDING = "sliding_attention"
FULL = "full_attention"
ON = {"use_sliding_window": True}


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize(
    "keys",
    [
        {"sliding_window": 4, "max_window_layers": 0},
        {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0},
        {**ON, "max_window_layers": 0},
        {**ON, "sliding_window": 4},
        {**ON, "sliding_window": 4, "max_window_layers": 3},
        {**ON, "sliding_window": 4, "max_window_layers": 2},
        {**ON, "sliding_window": 4, "max_window_layers": 0},
        {**ON, "sliding_window": 11, "max_window_layers": 2},
        {**ON, "sliding_window": 12, "max_window_layers": 0},
        {**ON, "sliding_window": None, "max_window_layers": 0},
        {**ON, "sliding_window": 4, "max_window_layers": 0, "layer_types": [FULL] * 3},
        {**ON, "sliding_window": 4, "layer_types": [FULL, SLIDING, FULL]},
        {**ON, "sliding_window": 12, "layer_types": [FULL, SLIDING, FULL]},
    ],
)
def test_a_window_is_refused_exactly_where_transformers_computes_something_else(
    architecture: str, keys: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    full = MODELS[architecture](ORACLES[architecture](**SMALL))
    windowed = MODELS[architecture](ORACLES[architecture](**SMALL, **keys))
    windowed.load_state_dict(full.state_dict())
    ids = torch.arange(12)[None]  # as long as a sequence may be
    same = torch.allclose(full(ids).logits, windowed(ids).logits, atol=1e-6)
    raw = {**SMALL, "architectures": [architecture]}
    if same:
        assert parse_config({**raw, **keys}) == parse_config(raw)
    else:
        with pytest.raises(InvalidInput, match="sliding_window is not supported where"):
            parse_config({**raw, **keys})


@pytest.mark.parametrize("architecture", ORACLES)
@pytest.mark.parametrize(
    ("layer_types", "fault"),
    [
        ([FULL, SLIDING, FULL], "layer_types is not supported; seen: sliding_attention"),
        ([FULL, "chunked_attention", FULL], "layer_types is not supported; seen: chunked"),
        ([FULL], "layer_types must be a list with one name a layer"),
        ("full", "layer_types must be a list with one name a layer"),
    ],
)
def test_layers_of_another_kind_are_refused_by_name(
    architecture: str, layer_types: object, fault: str
) -> None:
    raw = {**SMALL, "architectures": [architecture], "layer_types": layer_types}
    with pytest.raises(InvalidInput, match=fault):
        parse_config(raw)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 2**31), ("hidden_size", 2**31), ("rms_norm_eps", 10**400)],
)
def test_numbers_that_no_model_has_are_refused_by_name(key: str, value: int) -> None:
    raw = {**LEAST, "architectures": ["LlamaForCausalLM"], key: value}
    with pytest.raises(InvalidInput, match=key):
        parse_config(raw)


EXPERTS = {
    **LEAST,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
}


def test_experts_are_read_by_both_names_of_their_number() -> None:
    written = Qwen3MoeConfig(**{k: v for k, v in EXPERTS.items() if k != "architectures"}).to_dict()
    new = {**written, "architectures": EXPERTS["architectures"]}
    assert "num_local_experts" in new
    for raw in (EXPERTS, new):
        config = parse_config(raw, experts=True)
        assert (config.experts, config.experts_per_token, config.expert_size) == (16, 4, 32)
        assert config.qk_norm
        assert not config.qkv_bias


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is not supported"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers is not supported"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok must be a whole number"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size must be a whole number"),
    ],
)
def test_layers_that_differ_in_their_experts_are_refused(
    changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidInput, match=named):
        parse_config({**EXPERTS, **changed}, experts=True)


def test_a_model_with_experts_is_refused_where_it_cannot_be_computed() -> None:
    with pytest.raises(InvalidInput, match=r"not known here; seen: Qwen3Moe"):
        parse_config(EXPERTS)
