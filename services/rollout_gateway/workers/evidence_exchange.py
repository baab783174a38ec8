"""Lets engine workers learn from each other's rounds, and from those of processes that are gone.

Each worker reports its own rounds alone (WorkerHealth.evidence) and gets the sum of the others',
in the place of the last sum; so nothing is counted twice, however often evidence goes round. Sent
when the gateway has asked for health, that is at the end of every RunTasks, and to a worker that
has started again. Nobody waits for it.

What a process had said lasts beyond its end, in the evidence's file beyond the gateway's too: its
successor begins with it. It fades as the successors' own rounds are told.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.arm_names import speculator_of
from paceline.errors import DataLoss, ResourceExhausted
from paceline.messages import from_message, to_message, versions_from_proto, versions_to_proto
from paceline.services.rollout_gateway.bandits.evidence import (
    POLICY_TRIALS,
    Evidence,
    bounded,
    combine,
    faded,
)
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.speculators.kinds import SPECULATORS
from paceline.tagged_json import from_object, to_object
from paceline.telemetry import get_logger
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.whole_files import write_whole

FADES = 0.5
"""Share that is left of what a process that is gone had said, each time evidence goes round."""
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ToldEvidence:
    """What rounds have shown while a set served."""

    versions: VersionSet
    evidence: Evidence

    def under(self, versions: VersionSet) -> Evidence:
        """What is left of it where another set serves, as bandits take a new version: a new policy
        bounds what trials are worth, a new drafter is tried anew, seconds stay.
        """
        left = self.evidence
        if self.versions.drafter != versions.drafter:
            kept = tuple(one for one in left.acceptance if not _trained(one.family))
            left = replace(left, acceptance=kept)
        return left if self.versions.policy == versions.policy else bounded(left, POLICY_TRIALS)


@dataclass(frozen=True, slots=True)
class EvidenceFile:
    """What is kept over a restart of the gateway."""

    told: tuple[ToldEvidence, ...]


class EvidenceExchange:
    """What the workers of one gateway have said of their arms, with what it has from elsewhere."""

    def __init__(self, file: Path | None = None) -> None:
        """`file`: outlives the process; None: nothing does."""
        self._file = file
        self._said: dict[int, ToldEvidence] = {}
        self._elsewhere: tuple[ToldEvidence, ...] = ()
        self._former = _read(file) if file is not None else ()

    def spread(
        self, peers: Iterable[WorkerProcess], healths: Mapping[int, pb.WorkerHealth]
    ) -> None:
        """Remember what workers said, and tell each one of those that answered what the others
        know.
        """
        news = {index: told_by(health) for index, health in healths.items() if _knows(health)}
        if any(self._said.get(index) != told for index, told in news.items()):
            self._former = _faded(self._former)
        self._said |= news
        for peer in peers:
            if peer.index in healths:
                versions = versions_from_proto(healths[peer.index].versions)
                self._tell(peer, versions)
        self._keep()

    def hear(self, told: Iterable[ToldEvidence]) -> None:
        """What workers of other gateways of the run have shown, in the place of what was heard
        before; goes round with the next `spread`.
        """
        self._elsewhere = tuple(told)

    def teach(self, peer: WorkerProcess, versions: VersionSet) -> None:
        """A worker has started and serves `versions`: it gets what all knew, the process before it
        included.
        """
        if (before := self._said.pop(peer.index, None)) is not None:
            self._former = (*self._former, before)
        self._tell(peer, versions)

    def _tell(self, peer: WorkerProcess, versions: VersionSet) -> None:
        others = [
            *(one for index, one in self._said.items() if index != peer.index),
            *self._elsewhere,
        ]
        known = [one.evidence for one in others if one.versions == versions]
        known += [one.under(versions) for one in self._former]
        if any(known):
            evidence = to_message(combine(known), pb.BanditEvidence)
            message = pb.MergeEvidence(versions=versions_to_proto(versions), evidence=evidence)
            peer.send(pb.WorkerCommand(merge_evidence=message))

    def _keep(self) -> None:
        told = EvidenceFile((*self._said.values(), *self._former))
        if self._file is None or not told.told:
            return
        try:
            write_whole(self._file, json.dumps(to_object(told)))
        except ResourceExhausted as error:  # rollouts do not stop for it
            log.warning("what arms have shown is not kept", error=str(error))


def told_by(health: pb.WorkerHealth) -> ToldEvidence:
    """What a worker says of its own rounds."""
    evidence = from_message(Evidence, health.evidence)
    return ToldEvidence(versions_from_proto(health.versions), evidence)


def _read(file: Path) -> tuple[ToldEvidence, ...]:
    if not file.exists():
        return ()
    try:
        return from_object(EvidenceFile, json.loads(file.read_text(encoding="utf-8"))).told
    except (OSError, ValueError, RecursionError, DataLoss) as error:
        log.warning("arms are tried anew: what they have shown is lost", error=str(error)[:200])
        return ()


def _faded(told: Iterable[ToldEvidence]) -> tuple[ToldEvidence, ...]:
    left = (replace(one, evidence=faded(one.evidence, FADES)) for one in told)
    return tuple(one for one in left if one.evidence)


def _trained(family: str) -> bool:
    """Whether a version of the drafter changes what these arms draft."""
    known = SPECULATORS.get(speculator_of(family))
    return known is None or known.trained


def _knows(health: pb.WorkerHealth) -> bool:
    return bool(health.evidence.acceptance or health.evidence.costs)
