"""Defines a task, its error and its seeded order, and makes a task from a record by its columns:
plain, chat, GSM8K's, or a mapping's. file.py reads tasks without holding them in memory.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline.errors import InvalidInput

MAX_SAMPLES = 65_536
"""Largest number of tasks times samples in one RunTasks call."""


class TaskFileError(InvalidInput):
    """An unusable task file: names the file, the line or row, the value seen and the values
    allowed.
    """

    reason = "TASK_FILE"


@dataclass(frozen=True)
class Task:
    """One prompt with its verifiable answer."""

    task_id: str
    """Unique within its file."""
    prompt: str
    """The text given to the policy."""
    answer: str
    """The value with which a reward compares the response; may be empty."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Every further field of the file, as text."""


def write_tasks(path: str | Path, tasks: Iterable[Task]) -> None:
    """Writes one JSON object a line, with fields in the order task_id, prompt, answer, then
    metadata by name.
    """
    rows = (
        {"task_id": t.task_id, "prompt": t.prompt, "answer": t.answer}
        | dict(sorted(t.metadata.items()))
        for t in tasks
    )
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path(path).write_text(text, encoding="utf-8")


def draw_tasks(tasks: Sequence[Task], seed: int, position: int = 0) -> Iterator[Task]:
    """Draws tasks in a seeded order that is shuffled anew for each epoch and never ends.

    The order depends only on (seed, epoch) and the number of tasks. `position`: tasks drawn before.
    Raises InvalidInput for no tasks.
    """
    if not tasks:
        raise InvalidInput("there are no tasks to draw", seen=0, allowed="1 or more")
    for place in itertools.count(position):
        epoch, index = divmod(place, len(tasks))
        yield tasks[_order(seed, epoch, len(tasks))[index]]


# Without the cache, every step would shuffle a large file.
@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> array[int]:
    """[count] indices of one epoch, 8 bytes each."""
    # Seeding with text would depend on Random's own hashing; a digest is the same everywhere.
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    order = array("Q", range(count))
    random.Random(int.from_bytes(digest[:8], "big")).shuffle(order)
    return order


def scores_itself(environment: str) -> bool:
    """Whether an environment has rewards of its own, so that no rule scores its samples."""
    return environment.startswith(("verifiers:", "openenv:"))


def options_of(text: str) -> dict[str, Any]:
    """The options of a source, `NAME=VALUE&...`. A value is JSON, else the text itself. Raises
    TaskFileError for another form.
    """
    pairs = [one.partition("=") for one in text.split("&") if one]
    if not all(name and equals for name, equals, _ in pairs):
        raise TaskFileError("options of a source", seen=text, allowed="NAME=VALUE&...")
    return {name: _option_value(value) for name, _, value in pairs}


def _option_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def as_text(value: Any) -> str:
    """Text unchanged; anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


ROLES = ("system", "user", "assistant")
MESSAGES = "messages"
"""Column of a conversation, and the metadata key under which a task carries it as JSON."""
SYSTEM = "system"
"""Column of the first message of a conversation."""
ALLOWED = "prompt and answer; messages; or question and answer; or name the columns of yours"
_FINAL = "####"
_WITH_COMMAS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a file by their content; an empty name is the usual column. A name may be a path
    into records: `reward_model.ground_truth`.
    """

    prompt: str = ""
    """Text, or a list of messages."""
    answer: str = ""
    """Text or a number."""
    task_id: str = ""
    """Text or a whole number."""
    system: str = ""
    """Text of the system's message."""
    system_prompt: str = ""
    """The system message of every task without one."""


USUAL = Columns()


def task_of(
    place: str, number: int, record: Mapping[str, object], columns: Columns = USUAL
) -> Task:
    """The task of a record; a task without a task_id is named `row-<number>`.

    Raises TaskFileError naming the place and the field.
    """
    record = _renamed(place, record, columns)
    if "prompt" in record:
        used, messages, answer, found = _plain(place, record)
    elif MESSAGES in record:
        used, messages, answer, found = _chat(place, record, MESSAGES)
    elif "question" in record:
        used, messages, answer, found = _gsm8k(place, record)
    else:
        message = f"{place}: no column holds the prompt"
        raise TaskFileError(message, seen=list(record), allowed=ALLOWED)
    system = _text(place, record, SYSTEM) if SYSTEM in record else columns.system_prompt
    if isinstance(messages, str):
        prompt = messages
        asked = [{"role": "user", "content": prompt}] if system else []
    else:
        prompt, asked = messages[-1]["content"], messages
    if system and asked[0]["role"] != SYSTEM:
        asked = [{"role": SYSTEM, "content": system}, *asked]
    task_id = _id(place, record) if "task_id" in record else f"row-{number}"
    if not task_id or not prompt:
        message = f"{place}: task_id and prompt must not be empty"
        raise TaskFileError(message, seen=[task_id, prompt])
    told = {MESSAGES: json.dumps(asked, ensure_ascii=False)} if asked else {}
    used = ("task_id", SYSTEM, *used)
    return Task(task_id, prompt, answer, _rest(record, used) | found | told)


# Each returns its used columns, prompt or conversation, answer and further metadata.
_Found = tuple[Sequence[str], str | list[dict[str, str]], str, dict[str, str]]


def _renamed(place: str, record: Mapping[str, object], columns: Columns) -> Mapping[str, object]:
    """The record under the usual names."""
    named = {
        usual: name
        for usual in ("prompt", "answer", "task_id", SYSTEM)
        if (name := getattr(columns, usual)) and name != usual
    }
    if not named:
        return record
    found = {usual: _at(place, record, name) for usual, name in named.items()}
    moved = {name for name in named.values() if name in record}
    return {name: value for name, value in record.items() if name not in moved} | found


def _at(place: str, record: Mapping[str, object], path: str) -> object:
    """The value of a column, or at a path into it."""
    value: object = record
    for name in [path] if path in record else path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            seen = sorted(map(str, value)) if isinstance(value, Mapping) else repr(value)[:80]
            raise TaskFileError(f"{place}: there is no field {path!r}", seen=seen)
        value = value[name]
    return value


def _plain(place: str, record: Mapping[str, object]) -> _Found:
    if isinstance(record["prompt"], list):
        return _chat(place, record, "prompt")
    prompt, answer = _text(place, record, "prompt"), _answer(place, record)
    return ("prompt", "answer"), prompt, answer, {}


def _chat(place: str, record: Mapping[str, object], name: str) -> _Found:
    """The prompt is the last message's text. A closing answer of the assistant is the answer,
    unless a column has it.
    """
    messages = [
        _message(place, f"{name}[{index}]", one)
        for index, one in enumerate(_list(place, name, record[name]))
    ]
    answer = _answer(place, record) if "answer" in record else ""
    if messages and messages[-1]["role"] == "assistant":
        answer = messages.pop()["content"] if "answer" not in record else answer
    if not messages or messages[-1]["role"] != "user":
        message = f"{place}: {name} has no last message of the user"
        allowed = "a last message of the user, which one of the assistant may answer"
        raise TaskFileError(message, seen=[one["role"] for one in messages], allowed=allowed)
    return (name, "answer"), messages, answer, {}


def _gsm8k(place: str, record: Mapping[str, object]) -> _Found:
    """The text after #### in the answer is the answer; the text before it is metadata
    "solution".
    """
    question, text = _text(place, record, "question"), _answer(place, record)
    solution, found, answer = text.rpartition(_FINAL)
    answer = answer.strip()
    if _WITH_COMMAS.fullmatch(answer):
        answer = answer.replace(",", "")
    if found and not answer:
        raise TaskFileError(f"{place}: nothing follows {_FINAL}", seen=text[-80:])
    told = {"solution": solution.strip()} if found else {}
    return ("question", "answer"), question, answer, told


def _rest(record: Mapping[str, object], used: Sequence[str]) -> dict[str, str]:
    """Every other column, as text."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, default=str)
        for name, value in record.items()
        if name not in used
    }


def _list(place: str, name: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        message = f"{place}: {name} is no list"
        raise TaskFileError(message, seen=repr(value)[:80], allowed="a list of messages")
    return value


def _message(place: str, name: str, one: Any) -> dict[str, str]:
    role = one.get("role") if isinstance(one, Mapping) else None
    content = one.get("content") if isinstance(one, Mapping) else None
    if role not in ROLES or not isinstance(content, str):
        message = f"{place}: {name} is a message of another form"
        allowed = f"role ({', '.join(ROLES)}) and content, which is text"
        raise TaskFileError(message, seen=repr(one)[:80], allowed=allowed)
    return {"role": str(role), "content": content}


def _id(place: str, record: Mapping[str, object]) -> str:
    value = record["task_id"]
    whole = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if whole else _text(place, record, "task_id")


def _answer(place: str, record: Mapping[str, object]) -> str:
    """Text unchanged; a number as written, an integer without a decimal point. In files with a
    missing answer, integers have become floats.
    """
    value = record.get("answer")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            message = f"{place}: field 'answer' is not finite"
            raise TaskFileError(message, seen=value, allowed="text or a number")
        return str(int(value)) if value == int(value) else str(value)
    return _text(place, record, "answer", "text or a number")


def _text(place: str, record: Mapping[str, object], name: str, allowed: str = "text") -> str:
    if name not in record:
        message = f"{place}: field {name!r} is missing"
        raise TaskFileError(message, seen=list(record), allowed=ALLOWED)
    value = record[name]
    if not isinstance(value, str):
        message = f"{place}: field {name!r} is not {allowed}"
        raise TaskFileError(message, seen=repr(value)[:80], allowed=allowed)
    return value
