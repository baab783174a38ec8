"""Records the policy version with the best evaluation, beside the checkpoints."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import DataLoss
from paceline.whole_files import write_whole

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
        found = json.loads(text)
        return Best(int(found["policy_version"]), float(found["evaluation"]))
    except (ValueError, KeyError, TypeError) as error:
        raise DataLoss(f"{file} does not say which checkpoint is best", seen=text[:80]) from error


def write_best(directory: Path, best: Best) -> None:
    """Replaces the record. Raises ResourceExhausted if the disk is full."""
    write_whole(directory / FILE, json.dumps(asdict(best)) + "\n")
