"""Processes of reward rules, as the system lists them."""

from __future__ import annotations

import psutil


def rule_pids() -> set[int]:
    """Process ids of the children of this process that run reward rules."""
    children = psutil.Process().children()
    return {one.pid for one in children if "child_program" in " ".join(_command(one))}


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []
