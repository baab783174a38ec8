"""Opens a file of tasks, checks every record once, and reads a task when it is drawn.

The tasks are in an unnamed temporary file; memory holds their positions and sizes.
"""

import hashlib
import json
import os
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from paceline.errors import ConfigError, InvalidInput
from paceline.tasks.columns import MESSAGES, USUAL, Columns, task_of
from paceline.tasks.records import place_of, read_records
from paceline.tasks.task import Task, TaskFileError
from paceline.whole_files import writing

Keep = Callable[[Task], bool]


class TaskFile(Sequence[Task]):
    """The tasks of one file in its order."""

    def __init__(self, path: Path, keep: Keep | None = None, columns: Columns = USUAL) -> None:
        """`keep`: whether to include a task. `columns`: columns of its parts.

        Raises TaskFileError for an invalid record, a repeated id and no record at all, the
        InvalidInput of `keep`, and ResourceExhausted without space for temporary files.
        """
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the tasks
        self._ends = array("Q", [0])  # of each task in the file
        self._sizes = array("Q")
        self._path, self._numbers = path, array("Q")
        content, seen = hashlib.sha256(), dict[int, int]()
        for number, record in read_records(path):
            place = place_of(path, number)
            task = task_of(place, number, record, columns)
            first = seen.setdefault(_digest(task.task_id), number)
            if first != number:
                text = f"{place}: task_id was already used at {place_of(path, first)}"
                raise TaskFileError(text, seen=task.task_id)
            try:
                kept = keep is None or keep(task)
            except InvalidInput as error:
                raise error.within(place) from error
            if kept:
                self._add(number, task)
                content.update(json.dumps(_content(task)).encode())
        if not seen:
            raise TaskFileError("a task file holds no task", seen=path, allowed="1 or more")
        with writing(Path(tempfile.gettempdir())):
            self._file.flush()
        self.digest = content.hexdigest()[:16]
        """Hash of ids, prompts, conversations and answers, in order."""

    def _add(self, number: int, task: Task) -> None:
        text = json.dumps([task.task_id, task.prompt, task.answer, task.metadata]).encode()
        with writing(Path(tempfile.gettempdir())):
            self._file.write(text)
        self._ends.append(self._ends[-1] + len(text))
        self._numbers.append(number)
        texts = (task.task_id, task.prompt, task.answer, *task.metadata, *task.metadata.values())
        self._sizes.append(sum(len(one.encode()) for one in texts))

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        start, end = self._ends[at : at + 2]
        return Task(*json.loads(os.pread(self._file.fileno(), end - start, start)))

    def __iter__(self) -> Iterator[Task]:
        return (self[index] for index in range(len(self)))

    def largest(self, count: int, among: int | None = None) -> tuple[int, str]:
        """Bytes of the texts of the `count` largest tasks together, and the place of the largest.

        `among`: only the first so many tasks.
        """
        sizes = np.frombuffer(self._sizes, dtype=np.uint64)[:among]
        order = np.argsort(sizes, kind="stable")[::-1][:count]
        return int(sizes[order].sum()), place_of(self._path, self._numbers[int(order[0])])

    def check_call(
        self, setting: str, count: int, *, most_bytes: int, among: int | None = None
    ) -> None:
        """Raises ConfigError where the texts of `count` tasks, which `setting` gives, may have more
        than `most_bytes`. `among`: of the first so many tasks alone.
        """
        size, place = self.largest(count, among)
        if size > most_bytes:
            raise ConfigError(
                f"{place}: the largest task; {count} of the largest do not fit into one call of "
                f"the gateway; shorten or filter them, or lower {setting}",
                seen=f"{size} bytes",
                allowed=f"{most_bytes} bytes",
            )


def open_tasks(path: str | Path, keep: Keep | None = None, columns: Columns = USUAL) -> TaskFile:
    """The tasks of a .jsonl file, of .parquet files or of a dataset on disk, filtered by `keep`.

    Raises TaskFileError at the first invalid record.
    """
    return TaskFile(Path(path), keep, columns)


def read_tasks(path: str | Path, columns: Columns = USUAL) -> list[Task]:
    """Every task of a small file at once; see open_tasks."""
    return list(open_tasks(path, columns=columns))


def _content(task: Task) -> list[str]:
    """The content of a task; a plain one has no conversation."""
    told = [task.metadata[MESSAGES]] if MESSAGES in task.metadata else []
    return [task.task_id, task.prompt, task.answer, *told]


def _digest(task_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(task_id.encode(), digest_size=8).digest(), "big")
