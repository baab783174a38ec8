"""Reads the records of a JSONL file by number, with an index of 24 bytes a record in memory."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from paceline.tasks.task import TaskFileError

Record = Mapping[str, object]


class Rows(Protocol):
    """The records of a file, which are read when they are asked for."""

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
        # Split at "\n" alone: JSON text may hold the other line separators of Unicode unescaped.
        for number, raw in enumerate(self._opened, start=1):
            if raw.strip():
                self._lines.append(number)
                self._starts.append(start)
                self._sizes.append(len(raw))
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
            record = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise TaskFileError(
                f"{self.place(index)}: not a JSON object in UTF-8 ({error})", seen=raw[:80]
            ) from error
        if not isinstance(record, dict):
            raise TaskFileError(
                f"{self.place(index)}: not a JSON object", seen=raw[:80], allowed="a JSON object"
            )
        return record

    def __iter__(self) -> Iterator[Record]:
        return map(self.record, range(len(self)))
