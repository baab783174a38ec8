"""Runs work beside the event loop: background tasks, and threads for large requests.

The cost before planning grows with the bytes of a request: JSON, chat template, tokenization and
hashes. Small requests run directly on the event loop. Medium and large requests each wait for their
own thread, so that a few kilobytes do not wait for megabytes. At most two threads share Python's
lock with the loop. A thread's work cannot be interrupted; the callers bound sizes before.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from paceline.errors import ResourceExhausted
from paceline.local.patience import cancel as cancel
from paceline.services.rollout_gateway import metrics
from paceline.telemetry import get_logger

log = get_logger(__name__)


def background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task; its failure is logged with its traceback."""
    task = asyncio.create_task(work, name=name)

    def log_failure(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the gateway failed", task=name, exc_info=error)

    task.add_done_callback(log_failure)
    return task


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
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


SMALL_BYTES = 4 << 10
"""Largest request that runs on the loop; it takes a few milliseconds at most."""
LARGE_BYTES = 256 << 10
"""A larger request waits for the thread of large requests."""
MAX_HELD_BYTES = 128 << 20
"""Bytes of large requests that may be received, waiting or in work at once; more are refused."""
WAIT_S = 60.0
"""Seconds after which a waiting large request is refused."""

T = TypeVar("T")


class LargeRequests:
    """The two threads of one gateway and the bytes of the requests that they hold."""

    def __init__(self) -> None:
        self._held_bytes = 0
        self._medium = ThreadPoolExecutor(1, "medium-request")
        self._large = ThreadPoolExecutor(1, "large-request")

    def hold(self, size: int) -> None:
        """Count bytes of a large request. Raises ResourceExhausted above the limit of bytes."""
        held = self._held_bytes + size
        if held > MAX_HELD_BYTES:
            allowed = f"{MAX_HELD_BYTES} bytes"
            raise _refuse("too many bytes of large requests wait", f"{held} bytes", allowed)
        self._held_bytes = held

    def free(self, size: int) -> None:
        """Release bytes that `hold` has counted."""
        self._held_bytes -= size

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, or raise its exception. `size`: bytes of the request.

        Raises ResourceExhausted when too many bytes wait, or when this request waits too long.
        """
        if size <= SMALL_BYTES:
            return work()
        thread = self._medium if size <= LARGE_BYTES else self._large
        self.hold(size)
        try:
            async with asyncio.timeout(WAIT_S) as limit:
                return await asyncio.get_running_loop().run_in_executor(thread, work)
        except TimeoutError:
            if not limit.expired():
                raise
            waited = f"{WAIT_S:g} s"
            raise _refuse("a large request waited too long", waited, waited) from None
        finally:
            self.free(size)

    def stop(self) -> None:
        """Release the threads and drop their waiting work."""
        for thread in (self._medium, self._large):
            thread.shutdown(wait=False, cancel_futures=True)


def _refuse(message: str, seen: str, allowed: str) -> ResourceExhausted:
    metrics.QUEUE_REFUSED.record(reason="LARGE_REQUESTS")
    return ResourceExhausted(message, reason="LARGE_REQUESTS", seen=seen, allowed=allowed)
