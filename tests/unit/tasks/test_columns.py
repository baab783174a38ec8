"""Reading a record by its columns."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from paceline.tasks import Columns, Task, TaskFileError, task_of

SYSTEM = {"role": "system", "content": "Be short."}
USER = {"role": "user", "content": "6*7?"}
GIVEN = {"role": "assistant", "content": "42"}


def asked(*messages: dict[str, str]) -> dict[str, str]:
    return {"messages": json.dumps(list(messages))}


@pytest.mark.parametrize(
    ("record", "task"),
    [
        ({"prompt": "1=", "answer": "1"}, Task("row-4", "1=", "1")),
        ({"task_id": "a", "prompt": "1=", "answer": ""}, Task("a", "1=", "")),
        (
            {"question": "How many?", "answer": "60 and\n60.\n#### 1,200"},
            Task("row-4", "How many?", "1200", {"solution": "60 and\n60."}),
        ),
        ({"question": "q", "answer": "1,5 or so"}, Task("row-4", "q", "1,5 or so")),
        (
            {"messages": [SYSTEM, USER], "answer": "42"},
            Task("row-4", "6*7?", "42", asked(SYSTEM, USER)),
        ),
        ({"prompt": "1=", "answer": 1}, Task("row-4", "1=", "1")),
        ({"prompt": "1=", "answer": 18.0}, Task("row-4", "1=", "18")),
        ({"prompt": "1=", "answer": 0.25}, Task("row-4", "1=", "0.25")),
        ({"prompt": "1=", "answer": Decimal("1.50")}, Task("row-4", "1=", "1.50")),
        ({"task_id": 7, "prompt": "1=", "answer": ""}, Task("7", "1=", "")),
        (
            {"prompt": [SYSTEM, USER], "answer": 42},
            Task("row-4", "6*7?", "42", asked(SYSTEM, USER)),
        ),
        (
            {"prompt": "6*7?", "answer": "42", "system": "Be short."},
            Task("row-4", "6*7?", "42", asked(SYSTEM, USER)),
        ),
        ({"messages": [USER, GIVEN]}, Task("row-4", "6*7?", "42", asked(USER))),
        ({"messages": [USER], "level": 2}, Task("row-4", "6*7?", "", {"level": "2"} | asked(USER))),
    ],
)
def test_a_record_is_read_by_its_columns(record: dict[str, Any], task: Task) -> None:
    assert task_of("file, row 4", 4, record) == task


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            {"text": "x"},
            r"no column holds the prompt; seen: \['text'\]; allowed: prompt and answer",
        ),
        ({"question": "q"}, "field 'answer' is missing"),
        ({"question": "q", "answer": "so #### "}, "nothing follows ####; seen: so ####"),
        ({"question": None, "answer": "1"}, "'question' is not text; seen: None"),
        ({"messages": []}, r"has no last message of the user; seen: \[\]"),
        (
            {"messages": [SYSTEM]},
            r"has no last message of the user; seen: \['system'\]; allowed: a last message",
        ),
        ({"messages": "hello"}, "messages is no list; seen: 'hello'"),
        (
            {"messages": [USER, "hello"]},
            r"messages\[1\] is a message of another form; seen: 'hello'; allowed: role",
        ),
        ({"messages": [{"role": "robot", "content": "x"}]}, "of another form; seen: .*robot"),
        ({"prompt": [USER, GIVEN, GIVEN]}, "prompt has no last message of the user"),
        ({"prompt": "1=", "answer": True}, "'answer' is not text or a number; seen: True"),
        ({"prompt": "1=", "answer": None}, "'answer' is not text or a number; seen: None"),
        ({"prompt": "1=", "answer": ["1"]}, "'answer' is not text or a number"),
        ({"prompt": "1=", "answer": float("nan")}, "'answer' is not finite; seen: nan"),
        ({"prompt": "1=", "answer": "", "task_id": 1.5}, "'task_id' is not text; seen: 1.5"),
        ({"prompt": "1=", "answer": "", "system": 3}, "'system' is not text; seen: 3"),
        ({"messages": [{"role": "user", "content": None}]}, "of another form; seen: .*None"),
    ],
)
def test_a_record_that_is_no_task_is_refused_with_its_place(
    record: dict[str, Any], said: str
) -> None:
    with pytest.raises(TaskFileError, match=f"file, row 4: .*{said}"):
        task_of("file, row 4", 4, record)


VERL = {
    "prompt": [USER],
    "reward_model": {"style": "rule", "ground_truth": 42},
    "extra_info": {"index": 9},
}


def test_columns_of_another_name_and_fields_within_them_are_mapped() -> None:
    columns = Columns(answer="reward_model.ground_truth", task_id="extra_info.index")
    task = task_of("file, row 4", 4, VERL, columns)
    assert (task.task_id, task.prompt, task.answer) == ("9", "6*7?", "42")
    assert json.loads(task.metadata["messages"]) == [USER]
    flat = {"problem": "6*7?", "solution": "42", "level": "1"}
    mapped = task_of("f", 1, flat, Columns(prompt="problem", answer="solution"))
    assert mapped == Task("row-1", "6*7?", "42", {"level": "1"})
    dotted = {"a.b": "6*7?", "answer": ""}
    assert task_of("f", 1, dotted, Columns(prompt="a.b")).prompt == "6*7?"


def test_a_system_prompt_stands_before_every_task_that_has_none() -> None:
    columns = Columns(system_prompt="Be short.")
    for record in (
        {"prompt": "6*7?", "answer": "42"},
        {"messages": [USER], "answer": "42"},
        {"question": "6*7?", "answer": "#### 42"},
    ):
        told = task_of("f", 1, record, columns)
        assert json.loads(told.metadata["messages"]) == [SYSTEM, USER]
        assert told.answer == "42"
    other = {"role": "system", "content": "Be kind."}
    kept = task_of("f", 1, {"messages": [other, USER], "answer": ""}, columns)
    assert json.loads(kept.metadata["messages"]) == [other, USER]


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("solution", r"\['extra_info', 'prompt', 'reward_model'\]"),
        ("reward_model.truth", r"\['ground_truth', 'style'\]"),
        ("reward_model.style.more", "'rule'"),
    ],
)
def test_a_mapped_field_that_is_not_there_is_named_with_what_is(path: str, seen: str) -> None:
    with pytest.raises(TaskFileError, match=f"row 4: there is no field '{path}'; seen: {seen}"):
        task_of("file, row 4", 4, VERL, Columns(answer=path))
