"""Assigns engine workers to replicas, and cores to workers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def shares_of(workers: int, replicas: int) -> list[range]:
    """Workers of each replica, by their numbers, in shares as equal as possible. A share has
    consecutive numbers.
    """
    ends = [index * workers // replicas for index in range(replicas + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def own_cores(place: int, places: int, threads: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Cores of one worker among a host's cores: one per thread. With `threads` 0, each of `places`
    workers gets an equal number. Workers share cores if there are too few.
    """
    each = min(threads or max(1, len(cores) // places), len(cores))
    return tuple(cores[(place * each + index) % len(cores)] for index in range(each))
