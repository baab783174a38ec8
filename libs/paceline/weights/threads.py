"""Runs numpy, zlib and zstd work on several cores, since it releases the interpreter's lock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

MOST_THREADS = 4
"""Threads of one push. Beyond a few, memory is the limit, and engines may need the other cores."""


def in_threads(work: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """Results in the order of the items, with at most two items per thread in progress. Raises the
    errors of `work`.
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
