"""Counts the places for engine workers, and says which settings of them do not fit together and
whose they are: of which replica, on which host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from paceline.errors import ConfigError

OF_A_HOST = frozenset({"redis", "security", "telemetry"})
"""Settings of the gateway that hosts of its workers may have each for itself."""


def number_of_places(first: int, most_workers: int, hosts: Sequence[int], replicas: int) -> int:
    """Engine workers that there may be, where there are `first` at the start.

    Raises ConfigError for fewer than these, for others than there are places on hosts, and for
    places without a worker where several processes share the workers.
    """
    there = sum(hosts)
    most = most_workers or there or first
    if hosts and (most != there or first > most):
        raise ConfigError(
            "gateway.engine.hosts",
            seen=f"{list(hosts)}, workers={first}, most_workers={most}",
            allowed=f"at most {there} workers, most_workers 0 or {there}",
        )
    if most < first or (most > first and replicas > 1):
        raise ConfigError(
            "gateway.engine.most_workers",
            seen=f"{most}, of {first} workers and {replicas} replicas",
            allowed=f"0 or {first}" if replicas > 1 else f"0, or at least {first}",
        )
    return most


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


def by_host(share: range, hosts: Sequence[int]) -> tuple[int, ...]:
    """How many of these workers are on each host, where workers are numbered on over the hosts."""
    ends = list(accumulate(hosts, initial=0))
    return tuple(
        max(0, min(share.stop, end) - max(share.start, first)) for first, end in pairwise(ends)
    )
