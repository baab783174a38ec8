"""A task, its error, its seeded order, and the records of JSONL files by number."""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import os
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import InvalidInput
from paceline.whole_text import LONE_SURROGATE

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


class TaskCursor:
    """Draws tasks in a seeded order that is shuffled anew for each epoch and never ends.

    The order depends only on (seed, epoch) and the number of tasks. A cursor with the same tasks
    and seed, and the `position` of another cursor, continues exactly there.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, position: int = 0) -> None:
        """`position` counts the tasks drawn so far.

        Raises InvalidInput for no tasks or a negative position.
        """
        if not tasks:
            raise InvalidInput("a task cursor has no tasks", seen=0, allowed="1 or more")
        if position < 0:
            raise InvalidInput(
                "the position of a task cursor is negative", seen=position, allowed="0 or more"
            )
        self._tasks = tasks
        self._seed = seed
        self._position = position

    @property
    def position(self) -> int:
        """Tasks drawn since the start of the run, over all epochs."""
        return self._position

    @property
    def seed(self) -> int:
        """The seed of the order."""
        return self._seed

    def draw(self, count: int) -> list[Task]:
        """The next `count` tasks; an epoch's last draw continues into the next epoch. Raises
        InvalidInput for a negative count.
        """
        if count < 0:
            raise InvalidInput(
                "the count of tasks to draw is negative", seen=count, allowed="0 or more"
            )
        drawn = [self._task_at(self._position + offset) for offset in range(count)]
        self._position += count
        return drawn

    def _task_at(self, position: int) -> Task:
        epoch, index = divmod(position, len(self._tasks))
        return self._tasks[_order(self._seed, epoch, len(self._tasks))[index]]


# Each step makes a cursor: without the cache, every cursor would shuffle a large file.
@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> array[int]:
    """[count] indices of one epoch, 8 bytes each."""
    # Seeding with text would depend on Random's own hashing; a digest is the same everywhere.
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    order = array("Q", range(count))
    random.Random(int.from_bytes(digest[:8], "big")).shuffle(order)
    return order


Record = Mapping[str, object]
MAX_DEPTH = 64
"""Deepest nesting of objects and lists in a record."""


class Rows(Protocol):
    """The records of a file, read on access."""

    def __len__(self) -> int: ...

    def number(self, index: int) -> int:
        """Line or row, counted from 1."""

    def place(self, index: int) -> str:
        """File and line or row, for errors."""

    def record(self, index: int) -> Record:
        """One record. Raises TaskFileError."""

    def __iter__(self) -> Iterator[Record]:
        """All records in order. Raises TaskFileError."""


class JsonLines:
    """One JSON object a line; empty lines count as lines, not as records."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lines = array("Q")
        self._starts = array("Q")
        self._sizes = array("Q")
        self._opened = file.open("rb")
        start = 0
        # Split at "\n" only: JSON text may contain Unicode's other line separators unescaped.
        for number, raw in enumerate(self._opened, start=1):
            mark = len(codecs.BOM_UTF8) if not start and raw.startswith(codecs.BOM_UTF8) else 0
            if raw[mark:].strip():
                self._lines.append(number)
                self._starts.append(start + mark)
                self._sizes.append(len(raw) - mark)
            start += len(raw)

    def __len__(self) -> int:
        return len(self._lines)

    def number(self, index: int) -> int:
        return self._lines[index]

    def place(self, index: int) -> str:
        return f"{self._file}, line {self._lines[index]}"

    def record(self, index: int) -> Record:
        raw = os.pread(self._opened.fileno(), self._sizes[index], self._starts[index])
        try:
            record = read_json(raw)
        except (ValueError, RecursionError) as error:
            raise TaskFileError(
                f"{self.place(index)}: not a JSON object in UTF-8 ({error})", seen=raw[:80]
            ) from error
        if not isinstance(record, dict):
            raise TaskFileError(
                f"{self.place(index)}: not a JSON object", seen=raw[:80], allowed="a JSON object"
            )
        check_values(self.place(index), record)
        return record

    def __iter__(self) -> Iterator[Record]:
        return map(self.record, range(len(self)))


def read_json(raw: bytes) -> Any:
    """The value of a JSON text in UTF-8. Raises ValueError, also for NaN, for numbers beyond a
    float and for a repeated key; RecursionError.
    """
    return json.loads(
        raw.decode("utf-8"),
        parse_constant=_no_number,
        parse_float=_finite,
        object_pairs_hook=_distinct,
    )


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text[:80])


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} stands twice")
    return found


def check_values(place: str, record: Record) -> None:
    """Refuses a text that UTF-8 cannot encode and values that are nested too deeply.

    Raises TaskFileError naming the field, such as `metadata.tests[2]`.
    """
    left: list[tuple[str, object, int]] = [("", record, 0)]
    while left:
        name, value, depth = left.pop()
        if depth > MAX_DEPTH:
            raise TaskFileError(
                f"{place}: field {name[:80]!r} is nested too deep",
                seen=f"over {MAX_DEPTH} levels",
                allowed=f"{MAX_DEPTH} levels",
            )
        if isinstance(value, str):
            _check_text(place, f"field {name[:80]!r}", value)
        elif isinstance(value, list):
            left += [(f"{name}[{index}]", one, depth + 1) for index, one in enumerate(value)]
        elif isinstance(value, dict):
            for key, one in value.items():
                _check_text(place, f"a key in {name[:80]!r}" if name else "a field's name", key)
                left.append((f"{name}.{key}" if name else key, one, depth + 1))


def _check_text(place: str, what: str, text: str) -> None:
    if (at := LONE_SURROGATE.search(text)) is None:
        return
    raise TaskFileError(
        f"{place}: {what} holds half of a surrogate pair, which UTF-8 cannot spell",
        seen=repr(text[max(0, at.start() - 20) : at.end() + 20]),
        allowed="whole characters",
    )
