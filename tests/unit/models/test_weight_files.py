"""Which files of a checkpoint directory hold its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
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
