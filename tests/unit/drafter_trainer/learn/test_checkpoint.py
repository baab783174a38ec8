"""A checkpoint is there whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_trainer.learn.checkpoint import (
    STATE,
    CheckpointWriter,
    newest_checkpoint,
    read_checkpoint,
    read_whole,
)
from drafter_trainer.learn.membership import on_cpu
from paceline.errors import DataLoss, Unavailable

pytestmark = pytest.mark.usefixtures("one_rank")


def state(number: float) -> dict[str, Any]:
    return {
        "learner": {
            "model": {"a.w": torch.full((3, 2), number), "b": torch.tensor(number)},
            "steps": int(number),
        },
        "gate": {"baseline": None, "gains": [0.5, number]},
    }


def export(state: dict[str, Any], directory: Path) -> None:
    whole = read_whole(directory, "learner/model", state)
    (directory / "model.txt").write_text(str(whole["a.w"].sum().item()))


def write(directory: Path, *numbers: int) -> CheckpointWriter:
    writer = CheckpointWriter(directory, export)
    for number in numbers:
        writer.write(state(float(number)), number, on_cpu(1))
    writer.wait()
    return writer


def test_the_newest_of_two_is_read_with_all_that_is_no_tensor(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    assert newest_checkpoint(directory) is None
    assert write(directory, 1, 2, 10).next_number == 11
    newest = newest_checkpoint(directory)
    assert newest == directory / "checkpoint-10"
    assert sorted(path.name for path in directory.iterdir()) == ["checkpoint-10", "checkpoint-2"]
    read = read_checkpoint(newest, state(0.0), on_cpu(1))
    assert read["learner"]["model"]["a.w"].tolist() == [[10.0, 10.0]] * 3
    assert (float(read["learner"]["model"]["b"]), read["learner"]["steps"]) == (10.0, 10)
    assert read["gate"] == {"baseline": None, "gains": [0.5, 10.0]}
    assert (newest / "model.txt").read_text() == "60.0"


def test_what_is_being_written_counts_when_it_is_renamed_and_remains_are_removed(
    tmp_path: Path,
) -> None:
    write(tmp_path, 1)
    (tmp_path / "checkpoint-1").rename(tmp_path / ".2.tmp")  # killed before the rename
    assert newest_checkpoint(tmp_path) is None
    write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_tensors_that_are_new_or_gone_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, 1)
    like = {
        "learner": {"model": {"a.w": torch.zeros(3, 2)}},
        "shadow": {"model": {"w": torch.zeros(2)}},
    }
    read = read_checkpoint(tmp_path / "checkpoint-1", like, on_cpu(1))
    assert list(read["learner"]["model"]) == ["a.w"]
    assert "shadow" not in read


@pytest.mark.parametrize("damaged", [STATE, ".metadata", "__0_0.distcp"])
def test_a_damaged_file_is_data_loss(tmp_path: Path, damaged: str) -> None:
    write(tmp_path, 1)
    file = tmp_path / "checkpoint-1" / damaged
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(DataLoss):
        read_checkpoint(tmp_path / "checkpoint-1", state(0.0), on_cpu(1))


def test_another_shape_is_data_loss(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(DataLoss, match=r"a\.w"):
        read_checkpoint(
            tmp_path / "checkpoint-1", {"learner": {"model": {"a.w": torch.zeros(4, 2)}}}, on_cpu(1)
        )


def test_a_directory_that_cannot_be_written_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="file"):
        write(tmp_path / "file" / "drafter", 1)
