"""Records which entries each step trained, on disk until two checkpoints hold the step.

The record is written before the optimiser moves: a step that is replayed after a crash then has
exactly the siblings it had, however many have arrived since.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import DataLoss
from paceline.tagged_json import from_object, to_object


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The batch of one step, by name."""

    step: int
    policy_version: int  # the weights before the step
    trained: dict[str, str]  # entry id -> branch, in batch order
    dropped: dict[str, tuple[str, str]]  # entry id -> (branch, reason)
    dropped_groups: dict[str, int]  # reason -> groups


class RecordFile:
    """JSON lines, one per step since the last checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def load(self) -> list[StepRecord]:
        """Records in step order; a torn last line (a crash in the middle of a write) is no record.

        Raises DataLoss when a line before the last does not decode.
        """
        if not self._path.exists():
            return []
        lines = self._path.read_text().splitlines()
        records = []
        for number, line in enumerate(lines, 1):
            try:
                records.append(from_object(StepRecord, json.loads(line)))
            except (ValueError, DataLoss) as error:
                if number == len(lines):
                    break
                raise DataLoss(
                    f"{self._path} line {number} is no batch record", seen=line[:80]
                ) from error

        return records

    def append(self, record: StepRecord) -> None:
        """Adds a record; on disk when this returns.

        A record of the same or a later step is replaced.
        """
        self._write([*(r for r in self.load() if r.step < record.step), record])

    def forget(self, through_step: int) -> None:
        """Removes the records of steps that a checkpoint holds."""
        self._write([r for r in self.load() if r.step > through_step])

    def _write(self, records: list[StepRecord]) -> None:
        fresh = self._path.with_suffix(".tmp")
        with fresh.open("w") as file:
            file.writelines(json.dumps(to_object(record)) + "\n" for record in records)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
