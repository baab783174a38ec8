"""OUT/log.jsonl: a line per optimiser step and per judgement.

Owns the file, not what a line holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class RunLog:
    """Appends lines, each with its `step`; of the ranks one keeps it."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        self._path, self._keep = path, keep

    def keep_to(self, step: int) -> None:
        """Drops lines of later steps: a resumed run writes them again."""
        if not self._keep or not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        # A line that was being written when its process died has no end.
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        self._path.write_text("".join(kept if step else []), encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Appends one line."""
        if self._keep:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
