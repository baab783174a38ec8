"""Invalid records of a task file are rejected at the start, with file, line and field."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from paceline.errors import InvalidInput
from paceline.plugins import import_filter
from paceline.tasks import Task, TaskFileError
from paceline.tasks.file import TaskFile, read_tasks

HALF = "\ud83d"
GOOD = {"task_id": "t1", "prompt": "1+1=", "answer": "2"}


def written(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def refused(tmp_path: Path, line: str) -> str:
    """Return the error about an unusable second line."""
    with pytest.raises(TaskFileError) as caught:
        read_tasks(written(tmp_path, json.dumps(GOOD), line))
    said = str(caught.value)
    assert "tasks.jsonl, line 2" in said
    said.encode()  # it goes to terminals, logs and journals
    assert len(said) < 500
    return said


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"prompt": f"cut {HALF}", "answer": "1"}, "field 'prompt'"),
        ({"prompt": "1=", "answer": f"1{HALF}"}, "field 'answer'"),
        ({"prompt": "1=", "answer": "1", "task_id": f"{HALF}7"}, "field 'task_id'"),
        ({"prompt": "1=", "answer": "1", "system": HALF}, "field 'system'"),
        ({"prompt": "1=", "answer": "1", "level": HALF}, "field 'level'"),
        ({"prompt": "1=", "answer": "1", HALF: "x"}, "a field's name"),
        ({"prompt": "1=", "answer": "1", "cases": [{"stdin": HALF}]}, "field 'cases[0].stdin'"),
        ({"prompt": "1=", "answer": "1", "cases": [{HALF: "x"}]}, "a key in 'cases[0]'"),
        ({"messages": [{"role": "user", "content": HALF}]}, "field 'messages[0].content'"),
        (
            {"prompt": [{"role": "user", "content": HALF}], "answer": ""},
            "field 'prompt[0].content'",
        ),
        ({"question": f"How {HALF}?", "answer": "#### 1"}, "field 'question'"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_by_its_field(
    tmp_path: Path, record: dict[str, Any], field: str
) -> None:
    said = refused(tmp_path, json.dumps(record))
    assert f"{field} holds half of a surrogate pair" in said
    assert "allowed: whole characters" in said


def test_a_pair_of_surrogates_is_the_character_that_it_spells(tmp_path: Path) -> None:
    file = written(tmp_path, '{"prompt": "\\ud83d\\ude00", "answer": "\\ud83d\\ude00"}')
    assert read_tasks(file) == [Task("row-1", "😀", "😀")]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False, width=32),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def planted(data: st.DataObject, value: Any) -> Any:
    """The value with a lone surrogate at one of its texts, keys or leaves."""
    if isinstance(value, list) and value:
        at = data.draw(st.integers(0, len(value) - 1))
        return [planted(data, one) if i == at else one for i, one in enumerate(value)]
    if isinstance(value, dict) and value:
        at = data.draw(st.sampled_from(sorted(value)))
        if data.draw(st.booleans()):
            return value | {at: planted(data, value[at])}
        return {key: one for key, one in value.items() if key != at} | {f"{at}{HALF}": value[at]}
    half = data.draw(st.characters(categories=["Cs"]))
    return f"{data.draw(st.text(max_size=5))}{half}{data.draw(st.text(max_size=5))}"


@given(st.data(), VALUES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_lone_surrogate_anywhere_in_a_record_is_refused(
    tmp_path: Path, data: st.DataObject, value: Any
) -> None:
    name = data.draw(st.sampled_from(["prompt", "answer", "task_id", "messages", "more"]))
    record = {"prompt": "1=", "answer": "1"} | {name: planted(data, value)}
    # Two halves that a draw has put side by side are a whole character.
    line = json.dumps(record)
    if json.dumps(json.loads(line), ensure_ascii=False).isascii():
        return
    try:
        json.dumps(json.loads(line), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        assert "surrogate" in refused(tmp_path, line)


@given(VALUES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_task_of_a_record_without_one_can_be_sent(tmp_path: Path, value: Any) -> None:
    from paceline.messages import task_specs

    (task,) = read_tasks(written(tmp_path, json.dumps(GOOD | {"more": value})))
    (spec,) = task_specs([(0, task)], "s0")
    assert spec.FromString(spec.SerializeToString()).metadata["more"] == task.metadata["more"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "1=", "answer": NaN}', "NaN is no number of JSON"),
        ('{"prompt": "1=", "answer": "1", "level": [-Infinity]}', "-Infinity is no number"),
        ('{"prompt": "1=", "answer": "1", "level": 1e999}', "1e999 is no number"),
        ('{"prompt": "1=", "prompt": "2=", "answer": ""}', "the key 'prompt' is repeated"),
        ('{"prompt": "1=", "answer": "", "m": {"a": 1, "a": 2}}', "the key 'a' is repeated"),
        ('{"prompt": "1=", "answer": %s}' % ("9" * 5000), "4300 digits"),
        (
            '{{"prompt": "1=", "answer": "", "m": {}1{}}}'.format("[" * 70, "]" * 70),
            "nested too deep",
        ),
        (
            '{{"prompt": "1=", "answer": "", "m": {}1{}}}'.format("[" * 5000, "]" * 5000),
            "recursion",
        ),
    ],
)
def test_what_json_cannot_say_and_no_later_step_reads_is_refused(
    tmp_path: Path, line: str, said: str
) -> None:
    assert said in refused(tmp_path, line)


def test_a_whole_number_of_any_size_is_an_answer(tmp_path: Path) -> None:
    number = "9" * 400  # beyond a float's range
    assert read_tasks(written(tmp_path, f'{{"prompt": "1=", "answer": {number}}}'))[0].answer == (
        number
    )


def test_a_byte_order_mark_and_the_line_ends_of_windows_are_read(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    lines = [json.dumps(GOOD), "", json.dumps(GOOD | {"task_id": "t2"}), " "]
    file.write_bytes(codecs.BOM_UTF8 + "\r\n".join(lines).encode())
    tasks = TaskFile(file)
    assert [task.task_id for task in tasks] == ["t1", "t2"]
    assert tasks[1].prompt == "1+1="


def test_a_nul_character_is_a_character_like_any_other(tmp_path: Path) -> None:
    file = written(tmp_path, '{"prompt": "a\\u0000b", "answer": "\\u0000"}')
    assert read_tasks(file) == [Task("row-1", "a\0b", "\0")]


def test_parquet_text_that_utf8_cannot_spell_is_refused(tmp_path: Path) -> None:
    half = HALF.encode("utf-8", "surrogatepass")
    column = pyarrow.array([b"1=", half], pyarrow.binary()).view(pyarrow.string())
    file = tmp_path / "tasks.parquet"
    parquet.write_table(pyarrow.table({"prompt": column, "answer": ["1", "2"]}), file)
    with pytest.raises(TaskFileError, match=r"tasks\.parquet"):
        TaskFile(file)


def test_a_filter_that_raises_is_refused_with_the_line_at_which_it_did(tmp_path: Path) -> None:
    file = written(tmp_path, json.dumps(GOOD), json.dumps({"prompt": "2=", "answer": "two"}))
    (tmp_path / "own.py").write_text("def keep(task):\n    return int(task.answer) > 0\n")
    keep = import_filter(f"{tmp_path}/own.py:keep", "task filter")
    with pytest.raises(InvalidInput, match=r"line 2: the task filter failed: ValueError: inv"):
        TaskFile(file, keep)


def test_the_largest_tasks_are_measured_in_the_bytes_that_they_are_sent_as(tmp_path: Path) -> None:
    rows = [
        {"task_id": f"t{i}", "prompt": "é" * size, "answer": ""} for i, size in enumerate((1, 9, 4))
    ]
    tasks = TaskFile(written(tmp_path, *map(json.dumps, rows)))
    size, place = tasks.largest(2)
    assert (size, place.endswith("line 2")) == (2 * (9 + 4) + 2 * 2, True)
    assert tasks.largest(5, among=1)[0] == 4
