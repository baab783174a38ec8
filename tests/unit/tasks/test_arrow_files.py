"""Parquet files and datasets on disk: read row by row, and refused where they are damaged."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc, parquet

from paceline.tasks import Task, TaskFileError, draw_tasks, write_tasks
from paceline.tasks.file import TaskFile, read_tasks

ROWS = [{"task_id": f"t{i}", "prompt": f"{i}=", "answer": str(i), "level": i} for i in range(2500)]
TASKS = [Task(f"t{i}", f"{i}=", str(i), {"level": str(i)}) for i in range(2500)]


def dataset(directory: Path, rows: list[dict[str, Any]], files: int = 1) -> Path:
    """Write a dataset as datasets.Dataset.save_to_disk does."""
    directory.mkdir()
    names = [f"data-{i:05}-of-{files:05}.arrow" for i in range(files)]
    for i, name in enumerate(names):
        table = pyarrow.Table.from_pylist(
            rows[i * len(rows) // files : (i + 1) * len(rows) // files]
        )
        with ipc.new_stream(str(directory / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text("{}")
    return directory


def written(directory: Path, form: str) -> Path:
    if form == "dataset":
        return dataset(directory / "set", ROWS, files=3)
    path = directory / f"tasks.{form}"
    if form == "jsonl":
        write_tasks(path, TASKS)
    else:
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=700)
    return path


@pytest.mark.parametrize("form", ["jsonl", "parquet", "dataset"])
def test_every_form_gives_the_same_tasks_in_the_same_drawn_order(tmp_path: Path, form: str) -> None:
    tasks = TaskFile(written(tmp_path, form))
    assert (len(tasks), list(tasks)) == (2500, TASKS)
    assert (tasks[-1], tasks[998:1002]) == (TASKS[-1], TASKS[998:1002])
    with pytest.raises(IndexError):
        tasks[2500]
    drawn = [*islice(draw_tasks(tasks, seed=3), 2600)]
    assert drawn == [*islice(draw_tasks(TASKS, seed=3), 2600)]
    resumed = draw_tasks(TaskFile(tmp_path / tasks_path(form)), seed=3, position=2400)
    assert [*islice(resumed, 200)] == drawn[2400:]


def tasks_path(form: str) -> str:
    return "set" if form == "dataset" else f"tasks.{form}"


def test_a_filter_leaves_out_tasks_before_they_are_shuffled(tmp_path: Path) -> None:
    odd = TaskFile(written(tmp_path, "parquet"), keep=lambda task: int(task.answer) % 2 == 1)
    assert (len(odd), list(odd)) == (1250, TASKS[1::2])


@pytest.mark.parametrize("form", ["jsonl", "parquet", "dataset"])
def test_an_id_that_stands_twice_is_named_with_both_places(tmp_path: Path, form: str) -> None:
    rows = [*ROWS[:5], ROWS[2]]
    path = tmp_path / tasks_path(form)
    if form == "dataset":
        dataset(path, rows)
    elif form == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(TaskFileError, match=r"(line|row) 6: .*used at .*(line|row) 3; seen: t2"):
        read_tasks(path)


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "parquet")
    whole = path.read_bytes()
    for damage in (b"", b"PAR1", whole[: len(whole) // 2], b"x" * 4000 + whole[4000:]):
        path.write_bytes(damage)
        with pytest.raises(TaskFileError, match=r"tasks\.parquet: not a Parquet file"):
            read_tasks(path)


def test_a_dataset_that_is_cut_or_lacks_a_file_is_refused(tmp_path: Path) -> None:
    directory = written(tmp_path, "dataset")
    file = directory / "data-00001-of-00003.arrow"
    whole = file.read_bytes()
    for cut in (0, 7, 100, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(TaskFileError, match=r"data-00001.*(end mark|damaged)"):
            read_tasks(directory)
    file.write_bytes(b"\0" * 64 + whole[64:])
    with pytest.raises(TaskFileError, match="damaged Arrow data"):
        read_tasks(directory)
    file.unlink()
    with pytest.raises(TaskFileError, match=r"is not there; seen: .*data-00001"):
        read_tasks(directory)


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"_data_files": [{}]}', '{"_data_files": 3}'])
def test_a_state_of_another_form_is_refused(tmp_path: Path, state: str) -> None:
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(TaskFileError, match=r"state\.json: another form; seen: .*save_to_disk"):
        read_tasks(tmp_path)


def test_a_directory_without_a_dataset_and_one_of_splits_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="no dataset on disk"):
        read_tasks(tmp_path)
    dataset(tmp_path / "train", ROWS[:2])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(
        TaskFileError, match=r"several splits; name one of them; .*allowed: .*/train"
    ):
        read_tasks(tmp_path)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "dataset"])
def test_a_file_without_tasks_is_refused(tmp_path: Path, form: str) -> None:
    path = tmp_path / tasks_path(form)
    schema = pyarrow.schema([("prompt", pyarrow.string())])
    if form == "dataset":
        path.mkdir()
        with ipc.new_stream(str(path / "a.arrow"), schema):
            pass
        (path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    elif form == "parquet":
        parquet.write_table(schema.empty_table(), path)
    else:
        path.write_text("\n\n")
    with pytest.raises(TaskFileError, match="holds no task; seen: "):
        read_tasks(path)


def test_a_data_set_as_the_hub_has_it_is_named_by_a_split_of_its_files(tmp_path: Path) -> None:
    for split, rows in (("train", ROWS[:6]), ("test", ROWS[6:8])):
        for number in range(2):
            table = pyarrow.Table.from_pylist(rows[number::2])
            parquet.write_table(table, tmp_path / f"{split}-0000{number}-of-00002.parquet")
    tasks = read_tasks(f"{tmp_path}/train-*.parquet")
    assert tasks == [*TASKS[:6:2], *TASKS[1:6:2]]
    with pytest.raises(TaskFileError, match=r"name those of a split.*test-\*.*, .*train-\*"):
        read_tasks(tmp_path)
    with pytest.raises(TaskFileError, match=r"valid-\*\.parquet does not exist"):
        read_tasks(f"{tmp_path}/valid-*.parquet")
    (tmp_path / "train-00001-of-00002.parquet").write_bytes(b"PAR1")
    with pytest.raises(TaskFileError, match=r"train-00001-of-00002\.parquet: not a Parquet file"):
        read_tasks(f"{tmp_path}/train-*.parquet")
