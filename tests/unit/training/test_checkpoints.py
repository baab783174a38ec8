"""A checkpoint is there whole or not at all."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file
from unit.training import writing_ranks

from paceline import whole_files
from paceline.errors import DataLoss, Unavailable
from paceline.training import checkpoints
from paceline.training.checkpoints import (
    DAMAGED,
    PREFIX,
    SHARDS,
    STATE,
    WHOLE,
    CheckpointWriter,
    checkpoint_numbers,
    find_whole,
    read_checkpoint,
    read_each_whole,
)
from paceline.whole_files import MANIFEST, check_hashes, write_hashes

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
    whole = dict(read_each_whole(directory, "learner/model", state))
    (directory / "model.txt").write_text(str(whole["a.w"].sum().item()))


def write(directory: Path, *numbers: int) -> CheckpointWriter:
    writer = CheckpointWriter(directory, export)
    for number in numbers:
        writer.write(state(float(number)), number, None)
    writer.wait()
    return writer


def test_the_newest_of_two_is_read_with_all_that_is_no_tensor(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    assert checkpoint_numbers(directory) == []
    assert write(directory, 1, 2, 10).next_number == 11
    assert checkpoint_numbers(directory) == [2, 10]
    newest = directory / "checkpoint-10"
    assert sorted(path.name for path in directory.iterdir()) == ["checkpoint-10", "checkpoint-2"]
    read = read_checkpoint(newest, state(0.0))
    assert read["learner"]["model"]["a.w"].tolist() == [[10.0, 10.0]] * 3
    assert (float(read["learner"]["model"]["b"]), read["learner"]["steps"]) == (10.0, 10)
    assert read["gate"] == {"baseline": None, "gains": [0.5, 10.0]}
    assert (newest / "model.txt").read_text() == "60.0"


def test_what_is_being_written_counts_when_it_is_renamed_and_remains_are_removed(
    tmp_path: Path,
) -> None:
    write(tmp_path, 1)
    (tmp_path / "checkpoint-1").rename(tmp_path / ".2.tmp")  # killed before the rename
    assert checkpoint_numbers(tmp_path) == []
    write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_tensors_that_are_new_or_gone_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, 1)
    like = {
        "learner": {"model": {"a.w": torch.zeros(3, 2)}},
        "shadow": {"model": {"w": torch.zeros(2)}},
    }
    read = read_checkpoint(tmp_path / "checkpoint-1", like)
    assert list(read["learner"]["model"]) == ["a.w"]
    assert "shadow" not in read


SHARD = f"{SHARDS}/rank-0.safetensors"


def sign(checkpoint: Path) -> None:
    """Set the hashes to the files' hashes, as a forger would."""
    (checkpoint / MANIFEST).unlink()
    write_hashes(checkpoint)


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("damage", [flipped, half, lambda _: None])
@pytest.mark.parametrize("damaged", [STATE, SHARD, MANIFEST, "model.txt"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(
    tmp_path: Path, damaged: str, damage: Callable[[bytes], bytes | None]
) -> None:
    write(tmp_path, 1, 2)
    file = tmp_path / "checkpoint-2" / damaged
    changed = damage(file.read_bytes())
    file.unlink()
    if changed is not None:
        file.write_bytes(changed)
    found = find_whole(tmp_path, PREFIX, None)
    assert (found.checkpoint, found.newest) == (tmp_path / "checkpoint-1", 2)
    (fault,) = found.damaged
    assert "checkpoint-2" in fault
    assert damaged == MANIFEST or Path(damaged).name in fault
    assert (tmp_path / f"checkpoint-2{DAMAGED}").is_dir()
    assert find_whole(tmp_path, PREFIX, None).damaged == ()


@pytest.mark.parametrize("place", [STATE, SHARD, MANIFEST, "model.txt"])
def test_no_flipped_byte_of_a_checkpoint_goes_unseen(tmp_path: Path, place: str) -> None:
    write(tmp_path, 1)
    file = tmp_path / "checkpoint-1" / place
    data = file.read_bytes()
    for at in range(len(data)):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:
            check_hashes(tmp_path / "checkpoint-1")
        except DataLoss:
            continue
        # White space between the manifest's words changes nothing.
        assert place == MANIFEST
        assert json.loads(file.read_text()) == json.loads(data)


def test_where_all_are_damaged_none_is_taken(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    for number in (1, 2):
        (tmp_path / f"checkpoint-{number}" / SHARD).unlink()
    found = find_whole(tmp_path, PREFIX, None)
    assert (found.checkpoint, len(found.damaged), found.newest) == (None, 2, 2)


def test_a_checkpoint_holds_safetensors_and_json_alone(tmp_path: Path) -> None:
    write(tmp_path, 1)
    checkpoint = tmp_path / "checkpoint-1"
    names = {str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file()}
    assert names == {STATE, SHARD, MANIFEST, "model.txt"}
    assert json.loads((checkpoint / STATE).read_text())["learner"] == {"model": {}, "steps": 1}
    assert set(load_file(checkpoint / SHARD)) == {"learner/model/a.w", "learner/model/b"}


def test_tensors_of_the_exported_model_are_stored_there_alone(tmp_path: Path) -> None:
    def export_model(state: dict[str, Any], directory: Path) -> None:
        save_file(dict(read_each_whole(directory, "learner/model", state)), directory / WHOLE)

    moments = {"optimizer": {"a.w": torch.full((3, 2), 5.0)}}
    writer = CheckpointWriter(tmp_path, export_model, whole="learner/model")
    writer.write({**state(1.0), **moments}, 1, None)
    writer.wait()
    checkpoint = tmp_path / "checkpoint-1"
    assert set(load_file(checkpoint / SHARD)) == {"optimizer/a.w"}
    assert set(load_file(checkpoint / WHOLE)) == {"a.w", "b"}
    like = {**state(0.0), "optimizer": {"a.w": torch.zeros(3, 2)}}
    read = read_checkpoint(checkpoint, like, whole="learner/model")
    assert read["learner"]["model"]["a.w"].tolist() == [[1.0, 1.0]] * 3
    assert (float(read["learner"]["model"]["b"]), read["learner"]["steps"]) == (1.0, 1)
    assert read["optimizer"]["a.w"].tolist() == [[5.0, 5.0]] * 3

    (checkpoint / WHOLE).write_bytes(b"")
    assert find_whole(tmp_path, PREFIX, None).checkpoint is None


def test_a_checkpoint_with_the_weights_in_its_shards_is_read_too(tmp_path: Path) -> None:
    write(tmp_path, 1)
    read = read_checkpoint(tmp_path / "checkpoint-1", state(0.0), whole="learner/model")
    assert float(read["learner"]["model"]["b"]) == 1.0


class Planted:
    """Makes a file when unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.target,)


@pytest.mark.parametrize(
    "place",
    [STATE, SHARD, MANIFEST, "model.txt", f"{SHARDS}/.metadata", f"{SHARDS}/__0_0.distcp"],
)
def test_a_planted_pickle_is_never_executed(tmp_path: Path, place: str) -> None:
    write(tmp_path, 1)
    executed, file = tmp_path / "executed", tmp_path / "checkpoint-1" / place
    planted = pickle.dumps(Planted(executed))
    needed = place in (STATE, SHARD, MANIFEST)
    known = file.exists()
    file.write_bytes(planted)
    if known and place != MANIFEST:
        sign(tmp_path / "checkpoint-1")  # the file's content alone causes the rejection
    if needed:
        with pytest.raises(DataLoss):
            read_checkpoint(tmp_path / "checkpoint-1", state(0.0))
    else:
        read = read_checkpoint(tmp_path / "checkpoint-1", state(0.0))
        assert float(read["learner"]["model"]["b"]) == 1.0
    find_whole(tmp_path, PREFIX, None)
    assert not executed.exists()
    pickle.loads(planted)
    assert executed.exists(), "the plant does nothing: this test shows nothing"


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"learner/model/b":{"dtype":"F32","shape":[],"data_offsets":[0,400]}}',
        b'{"__metadata__":{"rows":"{"},'
        b'"learner/model/b":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}',
        b'{"__metadata__":{"rows":"[]"},'
        b'"learner/model/b":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}',
        b'{"__metadata__":{"rows":"{\\"learner/model/b\\":[\\"x\\"]}"},'
        b'"learner/model/b":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}',
        b'{"__metadata__":{"rows":"{}"},'
        b'"learner/model/b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    ],
)
def test_a_malformed_header_is_data_loss(tmp_path: Path, header: bytes) -> None:
    write(tmp_path, 1)
    checkpoint = tmp_path / "checkpoint-1"
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (checkpoint / SHARD).write_bytes(data)
    sign(checkpoint)
    with pytest.raises(DataLoss):
        read_checkpoint(checkpoint, state(0.0))


def test_the_newest_stay(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, lambda *_: None, prefix="step-")
    for number in range(1, 8):
        writer.write(state(0.0), number, None)
    writer.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-6", "step-7"]


def test_another_type_is_data_loss(tmp_path: Path) -> None:
    write(tmp_path, 1)
    like = {"learner": {"model": {"a.w": torch.zeros(3, 2, dtype=torch.bfloat16)}}}
    with pytest.raises(DataLoss, match="bfloat16"):
        read_checkpoint(tmp_path / "checkpoint-1", like)


def test_another_shape_is_data_loss(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(DataLoss, match=r"a\.w"):
        read_checkpoint(
            tmp_path / "checkpoint-1", {"learner": {"model": {"a.w": torch.zeros(4, 2)}}}
        )


def test_a_directory_that_cannot_be_written_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="file"):
        write(tmp_path / "file" / "drafter", 1)


def test_no_rank_is_done_with_a_checkpoint_before_rank_zero_has_read_all_shards(
    tmp_path: Path,
) -> None:
    run_ranks(writing_ranks.main, 2, tmp_path, tmp_path / "checkpoints")


def test_a_checkpoint_reports_that_its_bytes_reach_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_files, "PART_BYTES", 1 << 16)
    monkeypatch.setattr(checkpoints, "REPORT_S", 0.002)
    writer, reports = CheckpointWriter(tmp_path, lambda *_: None), list[float]()
    writer.write({"model": {"weight": torch.zeros(1 << 21)}}, 1, None)
    writer.wait(lambda: reports.append(time.monotonic()))
    assert reports
    written = len(reports)
    writer.wait(lambda: reports.append(time.monotonic()))
    assert len(reports) == written, "nothing is being written"
