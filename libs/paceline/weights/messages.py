"""Version sets between their noun and their message. Owns that translation alone."""

from __future__ import annotations

from paceline.trajectory import VersionSet
from paceline.v1 import trajectory_pb2


def versions_to_proto(versions: VersionSet) -> trajectory_pb2.VersionSet:
    """Message of a set."""
    return trajectory_pb2.VersionSet(
        seq=versions.seq, policy=versions.policy, drafter=versions.drafter
    )


def versions_from_proto(message: trajectory_pb2.VersionSet) -> VersionSet:
    """Noun of a message."""
    return VersionSet(message.seq, message.policy, message.drafter)
