"""Carries what workers have shown of their arms from each replica to the others."""

from __future__ import annotations

import asyncio

from paceline.errors import PacelineError, Unavailable
from paceline.services.rollout_gateway.replicas.fleet import ReplicaFleet
from paceline.telemetry import get_logger
from paceline.v1 import engine_pb2 as epb
from paceline.v1 import replica_pb2 as pb
from paceline.v1 import rollout_pb2 as rpb

DEADLINE_S = 10.0
log = get_logger(__name__)


async def exchange_evidence(fleet: ReplicaFleet) -> None:
    """Each replica hears the last word of the others' workers. One that is away hears it the next
    time; it begins with what it had written down.
    """
    replicas = fleet.ready
    asked = rpb.GetStatusRequest()
    answers = await asyncio.gather(
        *(one.ask(one.rollout.GetStatus, asked, DEADLINE_S) for one in replicas),
        return_exceptions=True,
    )
    said = [_said(answer) for answer in answers]
    tellings = []
    for number, replica in enumerate(replicas):
        told = [one for other, words in enumerate(said) if other != number for one in words]
        if told:
            request = pb.HearEvidenceRequest(told=told)
            tellings.append(replica.ask(replica.inner.HearEvidence, request, DEADLINE_S))
    for answer in (*answers, *await asyncio.gather(*tellings, return_exceptions=True)):
        if isinstance(answer, PacelineError):
            level = log.debug if isinstance(answer, Unavailable) else log.warning
            level("evidence did not reach a replica", error=str(answer))
        elif isinstance(answer, BaseException):
            raise answer


def _said(answer: rpb.GetStatusResponse | BaseException) -> list[epb.MergeEvidence]:
    if isinstance(answer, BaseException):
        return []
    healths = [worker.health for worker in answer.workers if worker.ready]
    return [
        epb.MergeEvidence(versions=health.versions, evidence=health.evidence)
        for health in healths
        if health.evidence.acceptance or health.evidence.costs
    ]
