"""Reads tasks from files without holding them in memory, and draws them in a fixed order."""

from paceline.tasks.columns import USUAL, Columns
from paceline.tasks.file import TaskFile, open_tasks, read_tasks
from paceline.tasks.task import MAX_SAMPLES, Task, TaskFileError, draw_tasks, write_tasks

__all__ = [
    "MAX_SAMPLES",
    "USUAL",
    "Columns",
    "Task",
    "TaskFile",
    "TaskFileError",
    "draw_tasks",
    "open_tasks",
    "read_tasks",
    "write_tasks",
]
