"""Reads tasks, draws them in a fixed order and makes the demo's; standard library only."""

from paceline.tasks.source import Task, TaskCursor, TaskFileError, read_tasks, write_tasks

__all__ = ["Task", "TaskCursor", "TaskFileError", "read_tasks", "write_tasks"]
