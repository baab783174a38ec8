"""Reads the records of Parquet files and of Hugging Face datasets on disk from mapped Arrow memory.

A dataset written by `save_to_disk` is a directory: state.json names Arrow stream files. Row groups
of Parquet cannot be read row by row, so they are first unpacked into a temporary file, batch by
batch.
"""

from __future__ import annotations

import json
import mmap
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import ipc, parquet

from paceline.tasks.task import Record, TaskFileError

BATCH = 1024
"""Rows converted to Python objects at once."""
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The end of a finished Arrow stream."""
_DAMAGED = (pyarrow.ArrowException, OSError)


class ArrowRows:
    """The rows of record batches."""

    def __init__(self, path: Path, batches: Iterable[Any]) -> None:
        """Raises TaskFileError for a batch with memory that contradicts its schema."""
        self._path = path
        self._batches = list(batches)
        try:
            for batch in self._batches:
                batch.validate(full=True)
        except _DAMAGED as error:
            raise damaged(path, error) from error
        self._starts: list[int] = list(
            accumulate((batch.num_rows for batch in self._batches), initial=0)
        )

    def __len__(self) -> int:
        return self._starts[-1]

    def number(self, index: int) -> int:
        return index + 1

    def place(self, index: int) -> str:
        return f"{self._path}, row {index + 1}"

    def record(self, index: int) -> Record:
        which = bisect_right(self._starts, index) - 1
        (record,) = self._batches[which].slice(index - self._starts[which], 1).to_pylist()
        return dict(record)

    def __iter__(self) -> Iterator[Record]:
        for batch in self._batches:
            for first in range(0, batch.num_rows, BATCH):
                yield from batch.slice(first, BATCH).to_pylist()


def parquet_rows(path: Path, files: Sequence[Path]) -> ArrowRows:
    """The rows of the files in order; `path` names all of them. Raises TaskFileError."""
    return ArrowRows(path, [batch for file in files for batch in _parquet(file)])


def _parquet(file: Path) -> list[Any]:
    try:
        with parquet.ParquetFile(file, page_checksum_verification=True) as source:
            unpacked = ipc.open_file(_unpacked(source))
        return [unpacked.get_batch(number) for number in range(unpacked.num_record_batches)]
    except _DAMAGED as error:
        raise TaskFileError(f"task file {file}: not a Parquet file ({error})") from error


def dataset_rows(directory: Path) -> ArrowRows:
    """Raises TaskFileError."""
    if (directory / "dataset_dict.json").is_file():
        splits = sorted(one.parent.name for one in directory.glob("*/state.json"))
        raise TaskFileError(
            "a directory of several splits; name one of them",
            seen=directory,
            allowed=", ".join(f"{directory}/{split}" for split in splits),
        )
    _refuse_parquet(directory)
    return ArrowRows(
        directory, [batch for file in _data_files(directory) for batch in _stream(file)]
    )


def _refuse_parquet(directory: Path) -> None:
    """Refuses a dataset in the Hub's form: a folder of Parquet files, of one split or several."""
    found = [] if (directory / "state.json").exists() else list(directory.rglob("*.parquet"))
    if found:
        splits = sorted({f"{file.parent}/{file.name.split('-')[0]}-*.parquet" for file in found})
        raise TaskFileError(
            "a directory of Parquet files; name those of a split",
            seen=directory,
            allowed=", ".join(splits[:8]),
        )


def damaged(path: Path, error: BaseException) -> TaskFileError:
    """The error for bytes that are no Arrow data."""
    return TaskFileError(f"{path}: damaged Arrow data", seen=error, allowed="what was written")


def _unpacked(source: Any) -> Any:
    """The whole file as an unnamed, mapped Arrow file."""
    with tempfile.TemporaryFile() as file:
        with ipc.new_file(file, source.schema_arrow) as writer:
            for batch in source.iter_batches(BATCH):
                writer.write_batch(batch)
        file.flush()
        return pyarrow.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _data_files(directory: Path) -> list[Path]:
    state = directory / "state.json"
    allowed = "a directory that datasets.Dataset.save_to_disk wrote"
    try:
        found = json.loads(state.read_bytes())
        names = [one["filename"] for one in found["_data_files"]]
        files = [directory / Path(name).name for name in names]
    except FileNotFoundError as error:
        raise TaskFileError("no dataset on disk", seen=directory, allowed=allowed) from error
    except (ValueError, KeyError, TypeError) as error:
        raise TaskFileError(f"{state}: another form", seen=repr(error), allowed=allowed) from error
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise TaskFileError(f"{state} names a file that is not there", seen=missing[0])
    return files


def _stream(file: Path) -> list[Any]:
    """Batches of a mapped Arrow stream."""
    try:
        mapped = pyarrow.memory_map(str(file))
        size = mapped.size()
        # A stream cut between two batches would read as a shorter stream.
        if size < len(_END) or mapped.read_at(len(_END), size - len(_END)) != _END:
            raise TaskFileError(f"{file}: ends before its end mark", seen=f"{size} bytes")
        return list(ipc.open_stream(mapped))
    except _DAMAGED as error:
        raise damaged(file, error) from error
