"""Task files and the cursor: bad records are rejected with their place, and a cursor resumes
exactly.
"""

from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidInput
from paceline.tasks import Task, TaskFileError, draw_tasks, write_tasks
from paceline.tasks.file import read_tasks

GOOD = '{"task_id": "t1", "prompt": "48:36=", "answer": "12"}'


def _tasks(count: int) -> list[Task]:
    return [Task(f"t{index}", f"p{index}", "") for index in range(count)]


def test_written_tasks_are_read_back_with_their_metadata(tmp_path: Path) -> None:
    tasks = [Task("a", "line\u2028separator\n", "1", {"split": "train"}), Task("b", "中🙂", "")]
    write_tasks(tmp_path / "tasks.jsonl", tasks)
    assert read_tasks(tmp_path / "tasks.jsonl") == tasks


def test_a_further_field_that_is_not_text_becomes_json_text(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"task_id": "a", "prompt": "p", "answer": "", "level": 3, "tags": ["x"]}\n')
    assert read_tasks(file)[0].metadata == {"level": "3", "tags": '["x"]'}


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("{not json", "{not json"),
        ("[1, 2]", "[1, 2]"),
        ('{"task_id": "t2", "prompt": "p"}', "field 'answer' is missing"),
        ('{"task_id": "t2", "prompt": 7, "answer": ""}', "seen: 7"),
        ('{"task_id": "", "prompt": "p", "answer": ""}', "seen: ['', 'p']"),
        (GOOD, "seen: t1"),
    ],
)
def test_a_bad_line_is_refused_with_its_number_and_what_was_seen(
    tmp_path: Path, line: str, seen: str
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(TaskFileError) as caught:
        read_tasks(file)
    assert "line 3" in str(caught.value)
    assert seen in str(caught.value)


def test_bytes_that_are_not_utf8_are_refused_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(GOOD.encode() + b'\n{"task_id": "\xff"}\n')
    with pytest.raises(TaskFileError, match="line 2"):
        read_tasks(file)


def test_a_missing_file_and_an_unknown_ending_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=r"absent\.jsonl does not exist"):
        read_tasks(tmp_path / "absent.jsonl")
    (tmp_path / "tasks.csv").write_text("")
    with pytest.raises(TaskFileError, match=r"seen: '\.csv'; allowed: \.jsonl, \.parquet"):
        read_tasks(tmp_path / "tasks.csv")


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 12), st.integers(0, 5))
def test_a_draw_from_a_position_continues_exactly(
    size: int, drawn: int, count: int, seed: int
) -> None:
    whole = [*islice(draw_tasks(_tasks(size), seed), drawn + count)]
    assert [*islice(draw_tasks(_tasks(size), seed, drawn), count)] == whole[drawn:]


def test_every_epoch_draws_each_task_once_in_an_order_of_its_own() -> None:
    tasks = draw_tasks(_tasks(50), seed=1)
    first, second = [*islice(tasks, 50)], [*islice(tasks, 50)]
    assert first != second
    assert (
        sorted(t.task_id for t in first)
        == sorted(t.task_id for t in second)
        == sorted(f"t{i}" for i in range(50))
    )


def test_the_order_depends_on_the_seed() -> None:
    one, other = (draw_tasks(_tasks(50), seed=seed) for seed in (1, 2))
    assert [*islice(one, 50)] != [*islice(other, 50)]


def test_no_tasks_cannot_be_drawn() -> None:
    with pytest.raises(InvalidInput, match="seen: 0"):
        next(draw_tasks([], seed=0))
