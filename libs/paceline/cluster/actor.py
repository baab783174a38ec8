"""What actors of ours have in common: a loop of their own, and the surroundings of whoever started
the run instead of Ray's.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from paceline.local import news
from paceline.local.forking import FORKSERVER_VARIABLE
from paceline.local.processes import HEARTBEAT_VARIABLE, PARENT_VARIABLE

_OF_RAY = ("RAY_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Variables that Ray sets for its own workers, not for what they start."""
_TRAVELLING = ("PACELINE_", "OTEL_", "HF_", "OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "SGLANG_")
"""Beginnings of the variables that services get from whoever starts the run."""
_AT_HOME = (PARENT_VARIABLE, HEARTBEAT_VARIABLE, FORKSERVER_VARIABLE, news.VARIABLE)
T = TypeVar("T")


class ActorLoop:
    """An event loop in a thread that stays as long as the actor, whose methods are called by Ray's
    threads: of asyncio's kind, since a child is tied to the thread that starts it.
    """

    def __init__(self) -> None:
        # Ray chooses uvloop's, whose children want the main thread.
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Runs it beside all else."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What it returns or raises."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def travelling() -> dict[str, str]:
    """Variables of this process that go with its work to another node."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_TRAVELLING) or name == "REDIS_URL") and name not in _AT_HOME
    }


def take_surroundings(directory: str, environment: Mapping[str, str]) -> None:
    """Enter the directory and set the environment, without variables and credentials of Ray."""
    os.chdir(directory)
    for name in [name for name in os.environ if name.startswith(_OF_RAY)]:
        del os.environ[name]
    os.environ.update(environment)
