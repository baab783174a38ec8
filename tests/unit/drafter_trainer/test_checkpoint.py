"""A checkpoint is there whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_trainer.checkpoint import STATE, CheckpointWriter, read_checkpoint
from paceline.errors import DataLoss


def write_model(state: dict[str, Any], directory: Path) -> None:
    (directory / "model.txt").write_text(str(state["steps"]))


def test_the_newest_whole_checkpoint_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints" / "drafter"
    assert read_checkpoint(directory) is None
    writer = CheckpointWriter(directory, write_model)
    for steps in (1, 2):
        writer.write({"steps": steps, "model": {"w": torch.full((3,), float(steps))}})
    writer.wait()
    state = read_checkpoint(directory)
    assert state is not None
    assert (state["steps"], state["model"]["w"].tolist()) == (2, [2.0] * 3)
    assert (directory / "model.txt").read_text() == "2"
    assert [path.name for path in directory.parent.iterdir()] == ["drafter"]
    directory.rename(directory.with_name("drafter.old"))  # killed between the two renames
    assert read_checkpoint(directory) is not None


def test_a_damaged_checkpoint_is_data_loss_and_a_full_disk_is_told(tmp_path: Path) -> None:
    directory = tmp_path / "drafter"
    writer = CheckpointWriter(directory, write_model)
    writer.write({"steps": 1})
    writer.wait()
    (directory / STATE).write_bytes((directory / STATE).read_bytes()[:40])
    with pytest.raises(DataLoss):
        read_checkpoint(directory)
    (tmp_path / "file").touch()
    blocked = CheckpointWriter(tmp_path / "file" / "drafter", write_model)
    blocked.write({"steps": 1})
    with pytest.raises(OSError, match="file"):
        blocked.wait()
