"""Lets engine workers learn from each other's rounds.

Each worker reports its own rounds alone (WorkerHealth.evidence) and gets the sum of the others',
in the place of the last sum; so nothing is counted twice, however often evidence goes round. Sent
when the gateway has asked for health, that is at the end of every RunTasks, and to a worker that
has started again. Nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.messages import from_message, to_message, versions_from_proto, versions_to_proto
from paceline.services.rollout_gateway.bandits.evidence import Evidence, combine
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb


class EvidenceExchange:
    """What the workers of one gateway have said of their arms."""

    def __init__(self) -> None:
        self._said: dict[int, pb.WorkerHealth] = {}

    def spread(
        self, peers: Iterable[WorkerProcess], healths: Mapping[int, pb.WorkerHealth]
    ) -> None:
        """Remember what workers said, and tell each one of those that answered what the others
        know.
        """
        self._said |= {index: health for index, health in healths.items() if _knows(health)}
        for peer in peers:
            if peer.index in healths:
                self._tell(
                    peer, versions_from_proto(healths[peer.index].versions), without=peer.index
                )

    def teach(self, peer: WorkerProcess, versions: VersionSet) -> None:
        """A worker has started and serves `versions`: it gets what all knew, the process before it
        included.
        """
        self._tell(peer, versions, without=None)

    def _tell(self, peer: WorkerProcess, versions: VersionSet, *, without: int | None) -> None:
        others = [
            from_message(Evidence, health.evidence)
            for index, health in self._said.items()
            if index != without and versions_from_proto(health.versions) == versions
        ]
        if others:
            evidence = to_message(combine(others), pb.BanditEvidence)
            message = pb.MergeEvidence(versions=versions_to_proto(versions), evidence=evidence)
            peer.send(pb.WorkerCommand(merge_evidence=message))


def _knows(health: pb.WorkerHealth) -> bool:
    return bool(health.evidence.acceptance or health.evidence.costs)
