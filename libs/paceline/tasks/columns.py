"""Makes a task of a record by the columns that it has: plain, chat, or GSM8K's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.tasks.task import Task, TaskFileError

ROLES = ("system", "user", "assistant")
MESSAGES = "messages"
"""Column of a conversation, and the metadata in which a task carries it as JSON."""
ALLOWED = "prompt and answer; messages; or question and answer"
_FINAL = "####"
_WITH_COMMAS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")


def task_of(place: str, number: int, record: Mapping[str, object]) -> Task:
    """The task of a record; `row-<number>` names one without a task_id.

    Raises TaskFileError naming the place.
    """
    if "prompt" in record:
        used, prompt, answer, found = _plain(place, record)
    elif MESSAGES in record:
        used, prompt, answer, found = _chat(place, record)
    elif "question" in record:
        used, prompt, answer, found = _gsm8k(place, record)
    else:
        raise TaskFileError(
            f"{place}: no column holds the prompt", seen=list(record), allowed=ALLOWED
        )
    task_id = _text(place, record, "task_id") if "task_id" in record else f"row-{number}"
    if not task_id or not prompt:
        raise TaskFileError(
            f"{place}: task_id and prompt must not be empty", seen=[task_id, prompt]
        )
    rest = {name: value for name, value in record.items() if name not in ("task_id", *used)}
    metadata = {
        name: value if isinstance(value, str) else json.dumps(value, default=str)
        for name, value in rest.items()
    }
    return Task(task_id, prompt, answer, metadata | found)


# Each returns the columns it has used, prompt, answer and further metadata.
_Found = tuple[Sequence[str], str, str, dict[str, str]]


def _plain(place: str, record: Mapping[str, object]) -> _Found:
    prompt, answer = (_text(place, record, name) for name in ("prompt", "answer"))
    return ("prompt", "answer"), prompt, answer, {}


def _chat(place: str, record: Mapping[str, object]) -> _Found:
    """The prompt is the last message's text; a closing answer of the assistant is the answer unless
    a column holds it.
    """
    messages = [_message(place, one) for one in _list(place, record[MESSAGES])]
    answer = _text(place, record, "answer") if "answer" in record else ""
    if messages and messages[-1]["role"] == "assistant":
        answer = messages.pop()["content"] if "answer" not in record else answer
    if not messages or messages[-1]["role"] != "user":
        raise TaskFileError(
            f"{place}: messages ask for nothing",
            seen=[one["role"] for one in messages],
            allowed="a last message of the user, which one of the assistant may answer",
        )
    told = {MESSAGES: json.dumps(messages, ensure_ascii=False)}
    return (MESSAGES, "answer"), messages[-1]["content"], answer, told


def _gsm8k(place: str, record: Mapping[str, object]) -> _Found:
    """What follows #### in the answer is the answer, what stands before it metadata "solution"."""
    question, text = (_text(place, record, name) for name in ("question", "answer"))
    solution, found, answer = text.rpartition(_FINAL)
    answer = answer.strip()
    if _WITH_COMMAS.fullmatch(answer):
        answer = answer.replace(",", "")
    if found and not answer:
        raise TaskFileError(f"{place}: nothing follows {_FINAL}", seen=text[-80:])
    told = {"solution": solution.strip()} if found else {}
    return ("question", "answer"), question, answer, told


def _list(place: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TaskFileError(
            f"{place}: messages are no list", seen=repr(value)[:80], allowed="a list of messages"
        )
    return value


def _message(place: str, one: Any) -> dict[str, str]:
    role = one.get("role") if isinstance(one, Mapping) else None
    content = one.get("content") if isinstance(one, Mapping) else None
    if role not in ROLES or not isinstance(content, str):
        raise TaskFileError(
            f"{place}: a message of another form",
            seen=repr(one)[:80],
            allowed=f"role ({', '.join(ROLES)}) and content, which is text",
        )
    return {"role": str(role), "content": content}


def _text(place: str, record: Mapping[str, object], name: str) -> str:
    if name not in record:
        raise TaskFileError(
            f"{place}: field {name!r} is missing", seen=list(record), allowed=ALLOWED
        )
    value = record[name]
    if not isinstance(value, str):
        raise TaskFileError(
            f"{place}: field {name!r} is not text", seen=repr(value), allowed="text"
        )
    return value
