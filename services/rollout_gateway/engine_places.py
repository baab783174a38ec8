"""Deals engine workers out to replicas, and cores to workers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def shares_of(workers: int, replicas: int) -> list[range]:
    """Workers of each replica, by their numbers, as evenly as can be: neighbours are together."""
    ends = [index * workers // replicas for index in range(replicas + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def own_cores(place: int, places: int, threads: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Of a host's cores those of one of its workers: one for each thread, or, where `threads` is 0,
    as many as each of `places` workers can have. With too few cores workers share them.
    """
    each = min(threads or max(1, len(cores) // places), len(cores))
    return tuple(cores[(place * each + index) % len(cores)] for index in range(each))
