"""What becomes of a record by its columns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.tasks import Task, TaskFileError
from paceline.tasks.columns import task_of

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
        ({"messages": []}, r"ask for nothing; seen: \[\]"),
        ({"messages": [SYSTEM]}, r"ask for nothing; seen: \['system'\]; allowed: a last message"),
        ({"messages": "hello"}, "messages are no list; seen: 'hello'"),
        ({"messages": ["hello"]}, "a message of another form; seen: 'hello'; allowed: role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "of another form; seen: .*robot"),
        ({"messages": [{"role": "user", "content": None}]}, "of another form; seen: .*None"),
    ],
)
def test_a_record_that_is_no_task_is_refused_with_its_place(
    record: dict[str, Any], said: str
) -> None:
    with pytest.raises(TaskFileError, match=f"file, row 4: .*{said}"):
        task_of("file, row 4", 4, record)
