"""The pool of rewards of a run, reserved on a real Ray cluster by another process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_nodes import TOKEN

from paceline.local.patience import patient
from paceline.services.rollout_gateway.config import SandboxConfig
from paceline.services.rollout_gateway.reward_pool.pool import RewardPool

RUN = "run-of-a-test"
HANGS_ONCE = """
import os, time

def note(episode):
    with open(episode.text, "a") as file:
        file.write(f"{os.getpid()} {os.getppid()}\\n")
    return open(episode.text).read().count("\\n")

class HangsOnce:
    def score(self, episode):
        if note(episode) == 1:
            time.sleep(1000)
        return 1.0
"""
"""A rule that notes its process and its actor in a file, and answers when it is asked again."""
_HEAD = Path(__file__).with_name("ray_head.py")


@contextmanager
def ray_head(*words: str) -> Iterator[str]:
    """A cluster on loopback, or what is reserved of one; its address. `words`: see ray_head.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)  # the same in all tests: Ray reads it once
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, str(_HEAD), *words]
        with subprocess.Popen(command, text=True, **pipes) as head:
            assert head.stdout is not None
            address = head.stdout.readline().strip()
            assert address
            yield address
            head.communicate("", timeout=patient(60))


@asynccontextmanager
async def joined_slots(address: str, count: int, **limits: object) -> AsyncIterator[RewardPool]:
    """The pool of a cluster, where it is reserved; `limits`: of its sandboxes."""
    pool = RewardPool(address, RUN, count, SandboxConfig.model_validate(limits))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


def actors() -> list[psutil.Process]:
    """Those of slots, on all nodes of this machine."""
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if "ray::SlotHost" in " ".join(one.info["cmdline"] or ())
    ]


def numbers_in(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()] if path.exists() else []


async def written(path: Path, still: asyncio.Task[Any]) -> list[int]:
    """Process ids that a rule or a program has written there; the deadline is the test's."""
    while not (found := numbers_in(path)):
        assert not still.done(), still.result()
        await asyncio.sleep(0.02)
    return found


def gone(pid: int) -> bool:
    try:
        psutil.Process(pid).wait(timeout=patient(10))
    except psutil.NoSuchProcess:
        return True
    return not psutil.pid_exists(pid)
