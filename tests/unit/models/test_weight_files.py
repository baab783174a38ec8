"""Which files of a checkpoint directory hold its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_models import load_model, save_random
from safetensors.torch import save_file

from paceline.errors import InvalidInput
from paceline.models.loading import read_tensors


def test_an_optimisers_state_beside_the_weights_is_left_alone(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"exp_avg/a": torch.zeros(2)}, tmp_path / "optimizer.safetensors")
    assert list(read_tensors(tmp_path)) == ["a"]


def test_shards_are_read_together(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    assert sorted(read_tensors(tmp_path)) == ["a", "b"]


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    save_file({"exp_avg/a": torch.zeros(2)}, tmp_path / "optimizer.safetensors")
    with pytest.raises(InvalidInput, match="no weights"):
        read_tensors(tmp_path)


def test_known_buffers_beside_the_weights_are_skipped(tmp_path: Path) -> None:
    buffers = [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "transformer.h.0.attn.masked_bias",
        "transformer.h.0.attn.bias",
    ]
    kept = ["model.layers.0.self_attn.q_proj.bias", "model.norm.weight"]
    save_file({name: torch.ones(2) for name in (*buffers, *kept)}, tmp_path / "model.safetensors")
    assert sorted(read_tensors(tmp_path)) == kept


def test_a_model_with_buffers_in_its_checkpoint_is_served(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    tensors = read_tensors(tmp_path)
    for shard in tmp_path.glob("model-*.safetensors"):
        shard.unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_model(tmp_path, dtype=torch.float32, positions=16).config.family == "llama"
