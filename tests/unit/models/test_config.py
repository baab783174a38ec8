"""What config.json leaves out is what transformers takes; what is not implemented is refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

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
