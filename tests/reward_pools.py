"""The pool of rewards of a run, reserved on a real Ray cluster by another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest

from paceline.local.patience import patient
from paceline.services.rollout_gateway.config import SandboxConfig
from paceline.services.rollout_gateway.reward_pool.pool import RewardPool

RUN = "run-of-a-test"
TOKEN = "of-a-cluster-that-tests-start-" * 2
_HEAD = Path(__file__).with_name("ray_head.py")


@contextmanager
def ray_head(*words: str) -> Iterator[str]:
    """A cluster on loopback; its address. `words`: see ray_head.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
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
