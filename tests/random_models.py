"""Tiny random checkpoints of the three families, written by transformers: forward oracles."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from paceline.models.config import read_config
from paceline.models.decoder import DecoderWeights
from paceline.models.in_place import ServedModel

FAMILIES = ("llama", "llama3-scaled", "llama-tied", "qwen2", "qwen3")

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def random_model(
    family: str, seed: int = 0, sharpness: float = 1.0, **shape: object
) -> PreTrainedModel:
    """A random fp32 model; sharpness scales the head, so that draws are peaked like a trained
    model's.
    """
    torch.manual_seed(seed)
    shape = {**_SHAPE, **shape}
    match family:
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**shape))
        case "llama3-scaled":
            model = LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=_LLAMA3))
        case "llama-tied":
            model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=False))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=24, tie_word_embeddings=False))
        case "qwen3_moe":
            own = {"head_dim": 24, "norm_topk_prob": True, "tie_word_embeddings": False}
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**own, **_EXPERTS, **shape}))
        case _:
            raise ValueError(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
            elif "embed" not in name:
                parameter *= 4.0
        if family != "llama-tied":
            model.lm_head.weight *= sharpness
    return model.eval()


def save_random(
    directory: Path, family: str, seed: int = 0, sharpness: float = 1.0, **shape: object
) -> PreTrainedModel:
    """Saves the model in two shards (fp32) and returns it."""
    model = random_model(family, seed, sharpness, **shape)
    model.save_pretrained(directory, max_shard_size="200KB")
    return model


def load_model(
    directory: Path, *, dtype: torch.dtype, positions: int | None = None
) -> DecoderWeights:
    """A checkpoint directory as DecoderWeights.

    Raises InvalidInput, DataLoss or WeightsError.
    """
    config = read_config(directory)
    return ServedModel(config, dtype, positions or config.max_position_embeddings).load(directory)
