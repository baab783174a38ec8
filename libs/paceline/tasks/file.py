"""Opens a file of tasks, checks every record once, and reads a task when it is drawn.

The tasks are in an unnamed temporary file; memory holds their positions and sizes. A file is JSONL,
Parquet, or a source of tasks (generated.py, verifiers.py).
"""

import codecs
import hashlib
import json
import math
import os
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from paceline import tasks
from paceline.errors import LONE_SURROGATE, ConfigError, InvalidInput
from paceline.tasks import generated, verifiers
from paceline.whole_files import writing

Keep = Callable[[tasks.Task], bool]
ALLOWED = f".jsonl, .parquet (several: *.parquet), {generated.ALLOWED} or {verifiers.ALLOWED}"
Record = Mapping[str, object]
MAX_DEPTH = 64
"""Deepest nesting of objects and lists in a record."""
BATCH = 1024
"""Rows converted to Python objects at once."""


class TaskFile(Sequence[tasks.Task]):
    """The tasks of a .jsonl file, of .parquet files or of another source, in order."""

    def __init__(
        self,
        path: str | Path,
        keep: Keep | None = None,
        columns: tasks.Columns = tasks.USUAL,
        python: str = "",
    ) -> None:
        """`keep`: whether to include a task. `columns`: columns of its parts. `python`: of an
        environment of verifiers; see read_rows there.

        Raises TaskFileError for an invalid record, a repeated id and no record at all, the
        InvalidInput of `keep`, and ResourceExhausted without space for temporary files.
        """
        path = Path(path)
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the tasks
        self._ends = array("Q", [0])  # of each task in the file
        self._sizes = array("Q")
        self._path, self._numbers = path, array("Q")
        content, seen = hashlib.sha256(), dict[int, int]()
        for number, record in read_records(path, python):
            place = place_of(path, number)
            task = tasks.task_of(place, number, record, columns)
            first = seen.setdefault(_digest(task.task_id), number)
            if first != number:
                text = f"{place}: task_id was already used at {place_of(path, first)}"
                raise tasks.TaskFileError(text, seen=task.task_id)
            try:
                kept = keep is None or keep(task)
            except InvalidInput as error:
                raise error.within(place) from error
            if kept:
                self._add(number, task)
                content.update(json.dumps(_content(task)).encode())
        if not seen:
            raise tasks.TaskFileError("a task file holds no task", seen=path, allowed="1 or more")
        with writing(Path(tempfile.gettempdir())):
            self._file.flush()
        self.digest = content.hexdigest()[:16]
        """Hash of ids, prompts, conversations and answers, in order."""

    def _add(self, number: int, task: tasks.Task) -> None:
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
    def __getitem__(self, index: int) -> tasks.Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[tasks.Task]: ...

    def __getitem__(self, index: int | slice) -> tasks.Task | list[tasks.Task]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        start, end = self._ends[at : at + 2]
        return tasks.Task(*json.loads(os.pread(self._file.fileno(), end - start, start)))

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


def read_tasks(path: str | Path, columns: tasks.Columns = tasks.USUAL) -> list[tasks.Task]:
    """Every task of a small file at once; see TaskFile."""
    return list(TaskFile(path, columns=columns))


def _content(task: tasks.Task) -> list[str]:
    """The content of a task; a plain one has no conversation."""
    told = [task.metadata[tasks.MESSAGES]] if tasks.MESSAGES in task.metadata else []
    return [task.task_id, task.prompt, task.answer, *told]


def _digest(task_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(task_id.encode(), digest_size=8).digest(), "big")


def place_of(path: Path, number: int) -> str:
    """File and line or row, for errors."""
    return f"{path}, {'line' if path.suffix == '.jsonl' else 'row'} {number}"


def read_records(path: Path, python: str = "") -> Iterator[tuple[int, Record]]:
    """Each record with its line or row, counted from 1. `python`: of an environment of verifiers.

    Raises TaskFileError for a file that cannot be read, and at the first invalid record.
    """
    if generated.is_generated(path):
        yield from generated.generate_records(str(path))
        return
    if verifiers.is_environment(path):
        yield from verifiers.read_rows(str(path), python)
        return
    shards = []
    if not path.exists() and "*" in path.name and path.suffix == ".parquet":
        shards = sorted(path.parent.glob(path.name))
    if not shards and not path.exists():
        raise tasks.TaskFileError(f"task file {path} does not exist")
    if path.is_file() and path.suffix == ".jsonl":
        yield from _json_lines(path)
        return
    if path.is_dir():
        message, allowed = "a directory is no task file", f"{path}/train-*.parquet, or such"
        raise tasks.TaskFileError(message, seen=path, allowed=allowed)
    if path.suffix != ".parquet":
        seen = repr(path.suffix)
        raise tasks.TaskFileError(
            f"task file {path} has an unknown ending", seen=seen, allowed=ALLOWED
        )
    yield from enumerate(_parquet_rows(shards or [path]), start=1)


def _json_lines(path: Path) -> Iterator[tuple[int, Record]]:
    """One JSON object a line; empty lines count as lines, not as records."""
    with path.open("rb") as file:
        # Split at "\n" only: JSON text may contain Unicode's other line separators unescaped.
        for number, raw in enumerate(file, start=1):
            text = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if text.strip():
                yield number, _json_record(place_of(path, number), text)


def _json_record(place: str, raw: bytes) -> Record:
    try:
        record = _read_json(raw)
    except (ValueError, RecursionError) as error:
        message = f"{place}: not a JSON object in UTF-8 ({error})"
        raise tasks.TaskFileError(message, seen=raw[:80]) from error
    if not isinstance(record, dict):
        seen = raw[:80]
        raise tasks.TaskFileError(f"{place}: not a JSON object", seen=seen, allowed="a JSON object")
    _check_values(place, record)
    return record


def _rows(batches: Iterable[Any], fault: str) -> Iterator[Record]:
    """The rows of record batches. Raises TaskFileError for bytes that contradict the schema."""
    # pyarrow is slow to import, and readers of JSONL do not need it.
    from pyarrow import ArrowException

    try:
        for batch in batches:
            batch.validate(full=True)
            for first in range(0, batch.num_rows, BATCH):
                yield from batch.slice(first, BATCH).to_pylist()
    except (ArrowException, OSError) as error:
        raise tasks.TaskFileError(f"{fault} ({error})") from error


def _parquet_rows(files: Sequence[Path]) -> Iterator[Record]:
    for file in files:
        yield from _rows(_parquet_batches(file), f"task file {file}: not a Parquet file")


def _parquet_batches(file: Path) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(file, page_checksum_verification=True) as source:
        yield from source.iter_batches(BATCH)


def _read_json(raw: bytes) -> Any:
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
        raise ValueError(f"the key {twice[:80]!r} is repeated")
    return found


def _check_values(place: str, record: Record) -> None:
    """Refuses a text that UTF-8 cannot encode and values that are nested too deeply.

    Raises TaskFileError naming the field, such as `metadata.tests[2]`.
    """
    left: list[tuple[str, object, int]] = [("", record, 0)]
    while left:
        name, value, depth = left.pop()
        if depth > MAX_DEPTH:
            message = f"{place}: field {name[:80]!r} is nested too deep"
            seen = f"over {MAX_DEPTH} levels"
            raise tasks.TaskFileError(message, seen=seen, allowed=f"{MAX_DEPTH} levels")
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
    message = f"{place}: {what} holds half of a surrogate pair, which UTF-8 cannot spell"
    seen = repr(text[max(0, at.start() - 20) : at.end() + 20])
    raise tasks.TaskFileError(message, seen=seen, allowed="whole characters")
