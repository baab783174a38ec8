"""A task, its error, and the writing of tasks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import InvalidInput

MAX_SAMPLES = 65_536
"""Largest number of tasks times samples in one RunTasks call."""


class TaskFileError(InvalidInput):
    """An unusable task file: names the file, the line or row, the value seen and the values
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
    """The value with which a reward compares the response; may be empty."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Every further field of the file, as text."""


def write_tasks(path: str | Path, tasks: Iterable[Task]) -> None:
    """Writes one JSON object a line, with fields in the order task_id, prompt, answer, then
    metadata by name.
    """
    rows = (
        {"task_id": t.task_id, "prompt": t.prompt, "answer": t.answer}
        | dict(sorted(t.metadata.items()))
        for t in tasks
    )
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path(path).write_text(text, encoding="utf-8")
