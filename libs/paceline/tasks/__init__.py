"""Tasks: where they come from, the order in which they are drawn, and the demo's family.

Owns no rewards and no tokens; standard library only.
"""

from paceline.tasks.source import Task, TaskCursor, TaskFileError, read_tasks, write_tasks

__all__ = ["Task", "TaskCursor", "TaskFileError", "read_tasks", "write_tasks"]
