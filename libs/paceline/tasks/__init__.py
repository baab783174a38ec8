"""Defines a task, its error and its seeded order; file.py reads tasks without holding them in
memory.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
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


def draw_tasks(tasks: Sequence[Task], seed: int, position: int = 0) -> Iterator[Task]:
    """Draws tasks in a seeded order that is shuffled anew for each epoch and never ends.

    The order depends only on (seed, epoch) and the number of tasks. `position`: tasks drawn before.
    Raises InvalidInput for no tasks.
    """
    if not tasks:
        raise InvalidInput("there are no tasks to draw", seen=0, allowed="1 or more")
    for place in itertools.count(position):
        epoch, index = divmod(place, len(tasks))
        yield tasks[_order(seed, epoch, len(tasks))[index]]


# Without the cache, every step would shuffle a large file.
@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> array[int]:
    """[count] indices of one epoch, 8 bytes each."""
    # Seeding with text would depend on Random's own hashing; a digest is the same everywhere.
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    order = array("Q", range(count))
    random.Random(int.from_bytes(digest[:8], "big")).shuffle(order)
    return order
