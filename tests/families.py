"""Processes below one, found by what they run: ranks and engine workers are forks of another than
their service.
"""

from __future__ import annotations

import os
from contextlib import suppress

import psutil


def below(words: str, pid: int | None = None) -> list[psutil.Process]:
    """Processes below that one, else this, whose command line holds these words, in the order of
    their start.
    """
    found = []
    for process in psutil.Process(pid or os.getpid()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if words in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return sorted(found, key=lambda one: (one.create_time(), one.pid))
