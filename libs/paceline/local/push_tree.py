"""Computes how long a version of weights takes to reach many hosts, from one sender or by a tree.

Every host sends and receives at one rate, as much as its network carries. A version is cut into
equal chunks; a host that has a chunk sends it on to its children, one after the other, before it
sends them the next one. Sends of one host are never at once: at the same time they would end with
the last of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Network:
    """What lies between hosts."""

    host_bytes_s: float = 12.5e9
    """Bytes a second that a host sends, and that it receives: 100 Gbit/s."""
    hop_s: float = 0.0002
    """From the last byte of a chunk that is sent to the first one sent on."""
    chunk_bytes: int = 4 << 20
    """As `paceline.weights` cuts them."""


def direct_s(size: int, receivers: int, network: Network = Network()) -> float:
    """Seconds until the last of the receivers has all, each from the one sender."""
    return tree_s(size, receivers, max(1, receivers), network)


def tree_s(size: int, receivers: int, arity: int, network: Network = Network()) -> float:
    """Seconds until the last of the receivers has all, from a sender that is the root of a tree.

    Host 0 is the sender, and the children of host v are v * arity + 1 to v * arity + arity, filled
    in this order. A host sends a chunk to its i-th child in the i-th of its turns, and all its
    chunks in the rhythm of the sender, so that a chunk waits nowhere: the last one has left the
    sender's turns before it after (chunks - 1) * min(arity, receivers) of them, and comes down in
    as many turns as the places of the hosts on its way add to.

    Raises InvalidInput for an arity below 1.
    """
    if arity < 1:
        raise InvalidInput("a tree's hosts have children", seen=arity, allowed=">= 1")
    if receivers < 1 or size < 1:
        return 0.0
    chunks = math.ceil(size / network.chunk_bytes)
    turn_s = size / chunks / network.host_bytes_s
    arrives_s = [0.0] * (receivers + 1)  # the first chunk
    for host in range(1, receivers + 1):
        parent, place = divmod(host - 1, arity)
        arrives_s[host] = arrives_s[parent] + (place + 1) * turn_s + network.hop_s
    return (chunks - 1) * min(arity, receivers) * turn_s + max(arrives_s)
