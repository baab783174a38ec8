"""Runs what numpy, zlib and zstd compute outside the interpreter's lock on several cores."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

MOST_THREADS = 4
"""Of one push: beyond a few, memory is the limit, and engines may need the other cores."""


def in_threads(work: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """Results in the order of the items, of which at most two a thread are under way; raises what
    the work raises.
    """
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    under_way: deque[Future[B]] = deque()
    with ThreadPoolExecutor(threads, "weights") as pool:
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) >= 2 * threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
