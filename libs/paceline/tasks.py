"""Reads tasks from JSONL and Parquet files and draws them in a fixed order.

Standard library only; Parquet needs pyarrow, which is looked for only when such a file is opened.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import InvalidInput

_REQUIRED = ("task_id", "prompt", "answer")


class TaskFileError(InvalidInput):
    """A task file that cannot be used: names the file, the line or row, what was seen and what is
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
    """What a reward compares the response with; may be empty."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Every further field of the file, as text."""


def read_tasks(path: str | Path) -> list[Task]:
    """Reads every task of a .jsonl or .parquet file; raises TaskFileError at the first record that
    is wrong.
    """
    file = Path(path)
    if not file.is_file():
        raise TaskFileError(f"task file {file} does not exist")
    match file.suffix:
        case ".jsonl":
            records = _jsonl_records(file)
        case ".parquet":
            records = _parquet_records(file)
        case _:
            raise TaskFileError(
                f"task file {file} has an unknown ending",
                seen=repr(file.suffix),
                allowed=".jsonl, .parquet",
            )
    return _checked_tasks(records)


def write_tasks(path: str | Path, tasks: Iterable[Task]) -> None:
    """Writes one JSON object a line, fields in the order task_id, prompt, answer, then metadata by
    name.
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

    The order depends on (seed, epoch) alone, so a cursor made with the same tasks and seed and the
    `position` of another one continues exactly where that one stood.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, position: int = 0) -> None:
        """`position` counts the tasks drawn so far.

        Raises InvalidInput on no tasks or a negative position.
        """
        if not tasks:
            raise InvalidInput("a task cursor has no tasks", seen=0, allowed="1 or more")
        if position < 0:
            raise InvalidInput(
                "the position of a task cursor is negative", seen=position, allowed="0 or more"
            )
        self._tasks = tuple(tasks)
        self._seed = seed
        self._position = position
        self._order: tuple[int, list[int]] = (-1, [])

    @property
    def position(self) -> int:
        """Tasks drawn since the start of the run, over all epochs."""
        return self._position

    @property
    def seed(self) -> int:
        """The seed of the order."""
        return self._seed

    def draw(self, count: int) -> list[Task]:
        """The next `count` tasks; an epoch's last draw continues into the next epoch."""
        if count < 0:
            raise InvalidInput(
                "the count of tasks to draw is negative", seen=count, allowed="0 or more"
            )
        drawn = [self._task_at(self._position + offset) for offset in range(count)]
        self._position += count
        return drawn

    def _task_at(self, position: int) -> Task:
        epoch, index = divmod(position, len(self._tasks))
        if self._order[0] != epoch:
            # Seeding with text would depend on Random's own hashing; a digest is the same
            # everywhere.
            digest = hashlib.sha256(f"{self._seed}/{epoch}".encode()).digest()
            order = list(range(len(self._tasks)))
            random.Random(int.from_bytes(digest[:8], "big")).shuffle(order)
            self._order = (epoch, order)
        return self._tasks[self._order[1][index]]


def _jsonl_records(file: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    # Split at "\n" alone: JSON text may hold the other line separators of Unicode unescaped.
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            place = f"{file}, line {number}"
            if not raw.strip():
                continue
            try:
                record = json.loads(raw.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise TaskFileError(
                    f"{place}: not a JSON object in UTF-8 ({error})", seen=raw[:80]
                ) from error
            if not isinstance(record, dict):
                raise TaskFileError(
                    f"{place}: not a JSON object", seen=raw[:80], allowed="a JSON object"
                )
            yield place, record


def _parquet_records(file: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise TaskFileError(
            f"task file {file}: Parquet needs pyarrow (pip install pyarrow)"
        ) from error
    try:
        rows = parquet.read_table(file).to_pylist()
    except ArrowInvalid as error:
        raise TaskFileError(f"task file {file}: not a Parquet file ({error})") from error
    for number, row in enumerate(rows, start=1):
        yield f"{file}, row {number}", row


def _checked_tasks(records: Iterable[tuple[str, Mapping[str, object]]]) -> list[Task]:
    places: dict[str, str] = {}
    tasks = []
    for place, record in records:
        task = _task(place, record)
        if task.task_id in places:
            raise TaskFileError(
                f"{place}: task_id was already used at {places[task.task_id]}", seen=task.task_id
            )
        places[task.task_id] = place
        tasks.append(task)
    return tasks


def _task(place: str, record: Mapping[str, object]) -> Task:
    task_id, prompt, answer = (_text(place, record, name) for name in _REQUIRED)
    if not task_id or not prompt:
        raise TaskFileError(
            f"{place}: task_id and prompt must not be empty", seen=[task_id, prompt]
        )
    rest = {name: value for name, value in record.items() if name not in _REQUIRED}
    metadata = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in rest.items()
    }
    return Task(task_id, prompt, answer, metadata)


def _text(place: str, record: Mapping[str, object], name: str) -> str:
    if name not in record:
        raise TaskFileError(
            f"{place}: field {name!r} is missing", seen=list(record), allowed=_REQUIRED
        )
    value = record[name]
    if not isinstance(value, str):
        raise TaskFileError(
            f"{place}: field {name!r} is not text", seen=repr(value), allowed="text"
        )
    return value
