"""The computed time of a push to many hosts equals a simulation chunk by chunk."""

from __future__ import annotations

import heapq
import math

import pytest

from benchmarks.simulation.push_tree import Network, direct_s, tree_s
from paceline.errors import InvalidInput

SLOW = Network(host_bytes_s=100.0, hop_s=0.125, chunk_bytes=64)


def sent_chunk_by_chunk(size: int, receivers: int, arity: int, network: Network) -> float:
    """Every send of every host, one after the other, from a heap: when the last one arrives."""
    chunks = math.ceil(size / network.chunk_bytes)
    turn_s = size / chunks / network.host_bytes_s
    free_s = [0.0] * (receivers + 1)  # when each host has finished its sends
    here = [(0.0, chunk, 0) for chunk in range(chunks)]
    last_s = 0.0
    while here:
        at_s, chunk, host = heapq.heappop(here)
        last_s = max(last_s, at_s)
        for child in range(host * arity + 1, min(host * arity + arity, receivers) + 1):
            free_s[host] = max(free_s[host], at_s) + turn_s
            heapq.heappush(here, (free_s[host] + network.hop_s, chunk, child))
    return last_s


@pytest.mark.parametrize("arity", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [1, 64, 65, 1000])
def test_a_tree_takes_as_long_as_its_sends_one_by_one(size: int, arity: int) -> None:
    for receivers in (1, 2, 3, 4, 5, 8, 12, 13, 40, 63):
        expected = sent_chunk_by_chunk(size, receivers, arity, SLOW)
        assert tree_s(size, receivers, arity, SLOW) == pytest.approx(expected)


def test_one_sender_takes_a_copy_a_receiver_and_a_chain_little_more_than_one() -> None:
    network = Network(host_bytes_s=1e9, hop_s=0.0, chunk_bytes=1_000_000)
    assert direct_s(10**9, 63, network) == pytest.approx(63.0)
    assert tree_s(10**9, 63, 1, network) == pytest.approx(1.0 + 62 * 0.001)
    assert tree_s(10**9, 62, 2, network) == pytest.approx(2.0 + 2 * 5 * 0.001 - 0.002)


def test_nobody_to_send_to_takes_no_time_and_a_tree_without_children_is_refused() -> None:
    assert direct_s(10**9, 0) == tree_s(10**9, 0, 2) == 0.0
    with pytest.raises(InvalidInput, match="children"):
        tree_s(10**9, 3, 0)
