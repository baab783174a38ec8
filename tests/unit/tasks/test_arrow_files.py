"""Parquet files: read row by row, and refused where they are damaged."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from paceline.tasks import Task, TaskFileError, draw_tasks, write_tasks
from paceline.tasks.file import TaskFile, read_tasks

ROWS = [{"task_id": f"t{i}", "prompt": f"{i}=", "answer": str(i), "level": i} for i in range(2500)]
TASKS = [Task(f"t{i}", f"{i}=", str(i), {"level": str(i)}) for i in range(2500)]


def written(directory: Path, form: str) -> Path:
    path = directory / f"tasks.{form}"
    if form == "jsonl":
        write_tasks(path, TASKS)
    else:
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=700)
    return path


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
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
    return f"tasks.{form}"


def test_a_filter_leaves_out_tasks_before_they_are_shuffled(tmp_path: Path) -> None:
    odd = TaskFile(written(tmp_path, "parquet"), keep=lambda task: int(task.answer) % 2 == 1)
    assert (len(odd), list(odd)) == (1250, TASKS[1::2])


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_an_id_that_stands_twice_is_named_with_both_places(tmp_path: Path, form: str) -> None:
    rows = [*ROWS[:5], ROWS[2]]
    path = tmp_path / tasks_path(form)
    if form == "parquet":
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


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_file_without_tasks_is_refused(tmp_path: Path, form: str) -> None:
    path = tmp_path / tasks_path(form)
    schema = pyarrow.schema([("prompt", pyarrow.string())])
    if form == "parquet":
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
    with pytest.raises(TaskFileError, match=r"a directory is no task file.*train-\*"):
        read_tasks(tmp_path)
    with pytest.raises(TaskFileError, match=r"valid-\*\.parquet does not exist"):
        read_tasks(f"{tmp_path}/valid-*.parquet")
    (tmp_path / "train-00001-of-00002.parquet").write_bytes(b"PAR1")
    with pytest.raises(TaskFileError, match=r"train-00001-of-00002\.parquet: not a Parquet file"):
        read_tasks(f"{tmp_path}/train-*.parquet")
