"""Computes the time for a weight version to reach many hosts, from one sender or by a tree.

Every host sends and receives at the same rate, the capacity of its network. A version is cut into
equal chunks. A host sends each chunk to its children one after the other, then the next chunk.
Concurrent sends of a host would only end together with the last send.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Network:
    """The network between hosts."""

    host_bytes_s: float = 12.5e9
    """Bytes per second that a host sends, and that it receives: 100 Gbit/s."""
    hop_s: float = 0.0002
    """Seconds from the last received byte of a chunk to its first forwarded byte."""
    chunk_bytes: int = 4 << 20
    """Chunk size of `paceline.weights`."""


def direct_s(size: int, receivers: int, network: Network = Network()) -> float:
    """Seconds until the last receiver is complete, if one sender serves all receivers."""
    return tree_s(size, receivers, max(1, receivers), network)


def tree_s(size: int, receivers: int, arity: int, network: Network = Network()) -> float:
    """Seconds until the last receiver is complete, with a tree rooted at the sender.

    Host 0 is the sender. The children of host v are v * arity + 1 to v * arity + arity, filled in
    this order. A host sends a chunk to its i-th child in its i-th turn. Every host sends chunks at
    the sender's rate, so that no chunk waits. The sender finishes the earlier chunks after (chunks
    - 1) * min(arity, receivers) turns. The last chunk then takes as many turns as the sum of the
    child positions on its path.

    Raises InvalidInput for an arity below 1.
    """
    if arity < 1:
        raise InvalidInput("a tree's hosts have children", seen=arity, allowed=">= 1")
    if receivers < 1 or size < 1:
        return 0.0
    chunks = math.ceil(size / network.chunk_bytes)
    turn_s = size / chunks / network.host_bytes_s
    arrives_s = [0.0] * (receivers + 1)  # arrival of the first chunk
    for host in range(1, receivers + 1):
        parent, place = divmod(host - 1, arity)
        arrives_s[host] = arrives_s[parent] + (place + 1) * turn_s + network.hop_s
    return (chunks - 1) * min(arity, receivers) * turn_s + max(arrives_s)
