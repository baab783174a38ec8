"""Keeps the records of batches and of the best evaluation beside the checkpoints."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DataLoss
from paceline.tagged_json import from_object, to_object
from paceline.whole_files import replace_synced, write_whole


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The batch of one step, by name."""

    step: int
    policy_version: int  # weights before the step
    trained: dict[str, str]  # entry id -> branch, in batch order
    dropped: dict[str, tuple[str, str]]  # entry id -> (branch, reason)
    dropped_groups: dict[str, int]  # reason -> groups


class RecordFile:
    """JSON lines, one per step since the last checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def load(self) -> list[StepRecord]:
        """Records in step order. Raises DataLoss for a line that was not written here."""
        if not self._path.exists():
            return []
        lines = self._path.read_text(errors="replace").splitlines()
        records = []
        for number, line in enumerate(lines, 1):
            try:
                written = json.loads(line)
                if written["sha256"] != _hash_of(written["record"]):
                    raise ValueError("another hash")
                records.append(from_object(StepRecord, written["record"]))
            except (ValueError, KeyError, TypeError, DataLoss) as error:
                raise DataLoss(f"{self._path} line {number} is damaged", seen=line[:80]) from error

        return records

    def append(self, record: StepRecord) -> None:
        """Adds a record, durable on return.

        A record of the same or a later step is replaced.
        """
        self._write([*(r for r in self.load() if r.step < record.step), record])

    def forget(self, through_step: int) -> None:
        """Removes the records of steps that a checkpoint holds."""
        self._write([r for r in self.load() if r.step > through_step])

    def _write(self, records: list[StepRecord]) -> None:
        lines = [{"sha256": _hash_of(one), "record": one} for one in map(to_object, records)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        replace_synced(self._path, text.encode())


def _hash_of(record: Any) -> str:
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


FILE = "best.json"


@dataclass(frozen=True, slots=True)
class Best:
    """The policy version with the best evaluation, and that evaluation; its checkpoint is kept."""

    policy_version: int
    evaluation: float


def read_best(directory: Path) -> Best | None:
    """Reads the record; None before the first evaluation. Raises DataLoss for a file in another
    form.
    """
    file = directory / FILE
    if not file.exists():
        return None
    text = file.read_text(encoding="utf-8")
    try:
        return from_object(Best, json.loads(text))
    except (ValueError, DataLoss) as error:
        raise DataLoss(f"{file} does not name the best checkpoint", seen=text[:80]) from error


def write_best(directory: Path, best: Best) -> None:
    """Replaces the record. Raises ResourceExhausted if the disk is full."""
    write_whole(directory / FILE, json.dumps(asdict(best)) + "\n")
