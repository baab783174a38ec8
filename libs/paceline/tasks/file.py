"""Opens a file of tasks by its format, checks every record once, and reads a task when it is drawn.

Of each task 8 bytes of its id's hash are held during the check, 8 bytes for its size, and with a
filter 8 bytes for its number; the records are not kept.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from paceline.errors import ConfigError, PacelineError
from paceline.tasks.columns import MESSAGES, USUAL, Columns, task_of
from paceline.tasks.task import JsonLines, Rows, Task, TaskFileError

ALLOWED = ".jsonl, .parquet (several: *.parquet), or a directory of datasets.Dataset.save_to_disk"
Keep = Callable[[Task], bool]


class TaskFile(Sequence[Task]):
    """The tasks of one file in its order. The file must not change during its use."""

    def __init__(
        self, path: Path, rows: Rows, keep: Keep | None = None, columns: Columns = USUAL
    ) -> None:
        """`keep`: whether to include a task. `columns`: columns of its parts.

        Raises TaskFileError for an invalid record, a repeated id, no record at all, and when `keep`
        raises.
        """
        self._rows = rows
        self._columns = columns
        self._kept = array("Q") if keep is not None else None
        self._sizes = array("Q")
        digests, content = array("Q"), hashlib.sha256()
        for index, record in enumerate(rows):
            task = task_of(rows.place(index), rows.number(index), record, columns)
            digests.append(_digest(task.task_id))
            if keep is not None and not _keeps(rows.place(index), keep, task):
                continue
            self._sizes.append(_size(task))
            content.update(json.dumps(_content(task)).encode())
            if self._kept is not None:
                self._kept.append(index)
        self.digest = content.hexdigest()[:16]
        """Hash of ids, prompts, conversations and answers, in order."""
        if not digests:
            raise TaskFileError("a task file holds no task", seen=path, allowed="1 or more")
        self._check_distinct(digests)

    def __len__(self) -> int:
        return len(self._rows) if self._kept is None else len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        return self._task(at if self._kept is None else self._kept[at])

    def __iter__(self) -> Iterator[Task]:
        return (self[index] for index in range(len(self)))

    def largest(self, count: int, among: int | None = None) -> tuple[int, str]:
        """Bytes of the texts of the `count` largest tasks together, and the place of the largest.

        `among`: only the first so many tasks.
        """
        sizes = np.frombuffer(self._sizes, dtype=np.uint64)[:among]
        order = np.argsort(sizes, kind="stable")[::-1][:count]
        row = int(order[0]) if self._kept is None else self._kept[int(order[0])]
        return int(sizes[order].sum()), self._rows.place(row)

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

    def _task(self, row: int) -> Task:
        rows = self._rows
        return task_of(rows.place(row), rows.number(row), rows.record(row), self._columns)

    def _check_distinct(self, digests: array[int]) -> None:
        hashes = np.frombuffer(digests, dtype=np.uint64)
        order = np.argsort(hashes, kind="stable")
        (equal,) = np.nonzero(np.diff(hashes[order]) == 0)
        for at in equal.tolist():
            first, again = (int(row) for row in order[at : at + 2])
            if self._task(first).task_id == self._task(again).task_id:
                raise TaskFileError(
                    f"{self._rows.place(again)}: task_id was already used at "
                    f"{self._rows.place(first)}",
                    seen=self._task(again).task_id,
                )


def open_tasks(path: str | Path, keep: Keep | None = None, columns: Columns = USUAL) -> TaskFile:
    """The tasks of a .jsonl file, of .parquet files or of a dataset on disk, filtered by `keep`.

    Raises TaskFileError at the first invalid record.
    """
    found = Path(path)
    return TaskFile(found, _rows(found), keep, columns)


def read_tasks(path: str | Path, columns: Columns = USUAL) -> list[Task]:
    """Every task of a small file at once; see open_tasks."""
    return list(open_tasks(path, columns=columns))


def _keeps(place: str, keep: Keep, task: Task) -> bool:
    """Raises an error of Paceline from the filter unchanged, TaskFileError for any other error."""
    try:
        return keep(task)
    except PacelineError:
        raise
    except Exception as error:
        raise TaskFileError(
            f"{place}: the task filter raised {type(error).__name__}: {error}", seen=task.task_id
        ) from error


def _size(task: Task) -> int:
    """Bytes of its texts."""
    texts = (task.task_id, task.prompt, task.answer, *task.metadata, *task.metadata.values())
    return sum(len(text.encode()) for text in texts)


def _content(task: Task) -> list[str]:
    """The content of a task; a plain one has no conversation."""
    told = [task.metadata[MESSAGES]] if MESSAGES in task.metadata else []
    return [task.task_id, task.prompt, task.answer, *told]


def _rows(path: Path) -> Rows:
    shards = _shards(path)
    if not shards and not path.exists():
        raise TaskFileError(f"task file {path} does not exist")
    if path.is_file() and path.suffix == ".jsonl":
        return JsonLines(path)
    if not path.is_dir() and path.suffix != ".parquet":
        raise TaskFileError(
            f"task file {path} has an unknown ending", seen=repr(path.suffix), allowed=ALLOWED
        )
    # pyarrow is slow to import, and readers of JSONL do not need it.
    from paceline.tasks.arrow import dataset_rows, parquet_rows

    return dataset_rows(path) if path.is_dir() else parquet_rows(path, shards or [path])


def _shards(path: Path) -> list[Path]:
    """The Parquet files that match a name with a *, in order."""
    if path.exists() or "*" not in path.name or path.suffix != ".parquet":
        return []
    return sorted(path.parent.glob(path.name))


def _digest(task_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(task_id.encode(), digest_size=8).digest(), "big")
