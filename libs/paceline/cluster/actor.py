"""Gives Paceline's actors their own event loop and the starter's environment in place of Ray's."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from paceline.local import news
from paceline.local.forking import FORKSERVER_VARIABLE
from paceline.local.processes import PARENT_VARIABLE

_OF_RAY = ("RAY_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Prefixes of variables that Ray sets for its workers. Services must not inherit them."""
_TRAVELLING = ("PACELINE_", "OTEL_", "HF_", "OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "SGLANG_")
"""Prefixes of variables that services inherit from the run's starter."""
_AT_HOME = (PARENT_VARIABLE, FORKSERVER_VARIABLE, news.VARIABLE)
T = TypeVar("T")


class ActorLoop:
    """An asyncio event loop in a thread that lives as long as the actor. Ray's threads call the
    actor's methods. A child process is tied to its starting thread, so all work runs on this loop.
    """

    def __init__(self) -> None:
        # Ray selects uvloop, which starts children in the main thread only.
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Starts a coroutine on the loop without waiting."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and returns its result, or raises its error."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def travelling() -> dict[str, str]:
    """Environment variables that this process passes to its services on other nodes."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_TRAVELLING) or name == "REDIS_URL") and name not in _AT_HOME
    }


def take_surroundings(directory: str, environment: Mapping[str, str]) -> None:
    """Changes to the directory and sets the environment, without Ray's variables and
    credentials.
    """
    os.chdir(directory)
    for name in [name for name in os.environ if name.startswith(_OF_RAY)]:
        del os.environ[name]
    os.environ.update(environment)
