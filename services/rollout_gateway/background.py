"""Runs background tasks of the event loop, logs their failures and cancels them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from paceline.telemetry import get_logger

log = get_logger(__name__)


def background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task; its failure is logged with its traceback."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_tell_failure)
    return task


async def cancel(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended."""
    started = [task for task in tasks if task is not None]
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("a task of the gateway failed", task=task.get_name(), exc_info=task.exception())


async def first_of(*waits: Coroutine[Any, Any, None]) -> None:
    """Return or raise when the first coroutine does. The other coroutines are cancelled, so a
    coroutine must not consume data before it returns.
    """
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel(*tasks)
