"""Distributes versions of weights to the replicas, which load them from one spool.

A set serves on all replicas or on none. If one replica refuses it, the replicas before it return to
the former set. A replica that was away loads the serving set at its return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

from paceline.errors import DataLoss, DeadlineExceeded, PacelineError, Unavailable, WeightsError
from paceline.local.patience import patient
from paceline.messages import versions_to_proto
from paceline.services.rollout_gateway.replicas.fleet import Replica, ReplicaFleet, each, refused
from paceline.services.rollout_gateway.workers.canary import LOST
from paceline.telemetry import get_logger
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as epb
from paceline.v1 import replica_pb2 as pb
from paceline.weights import Spool
from paceline.weights.committed_sets import part_version
from paceline.weights.push import COMMAND_DEADLINE_S, push_deadline_s

log = get_logger(__name__)


class ReplicaWeights:
    """WeightHooks of a head."""

    def __init__(self, fleet: ReplicaFleet, spool: Spool) -> None:
        self._fleet = fleet
        self._spool = spool
        self._swap = asyncio.Lock()  # a starting replica never gets half a commit
        self.versions = spool.serves

    async def bring(self, replica: Replica) -> None:
        """Makes a restarted replica serve the current set."""
        async with self._swap:
            mode = epb.PAUSE_MODE_IN_PLACE
            await self._serve(replica, self.versions, mode, (), judge=False, starting=True)

    async def on_prepared(self, target: int, version: int, path: Path) -> None:
        """Loads a version beside the serving one on every replica. The first failure fails the
        push.
        """
        request = pb.LoadVersionRequest(target=target, version=version, path=str(path))  # type: ignore[arg-type]
        deadline_s = self._deadline_s(target, version)
        async with self._swap:
            answers = await asyncio.gather(
                *(one.ask(one.inner.LoadVersion, request, deadline_s) for one in self._there),
                return_exceptions=True,
            )
        self._check(answers)

    async def on_commit(
        self, versions: VersionSet, mode: int, leased: Collection[int], *, judge: bool | None = None
    ) -> None:
        """Serves a set on every replica: first on one, whose canary tests it, then on the other
        replicas at once.

        Raises the error of the first replica that refuses; then all replicas serve the former set.
        """
        async with self._swap:
            there = self._canaries(leased)
            try:
                first = await self._judged(there, versions, mode, leased)
                others = [one for one in there if one is not first]
                answers = await asyncio.gather(
                    *(self._serve(one, versions, mode, leased, judge=False) for one in others),
                    return_exceptions=True,
                )
                self._check(answers)
            except PacelineError:
                await self._take_back(there)
                raise
            self.versions = versions

    async def on_abort(self, target: int, version: int) -> None:
        """Discards a prepared version."""
        request = pb.ForgetVersionRequest(target=target, version=version)  # type: ignore[arg-type]
        async with self._swap:
            await each(
                [
                    one.ask(one.inner.ForgetVersion, request, patient(COMMAND_DEADLINE_S))
                    for one in self._there
                ]
            )

    async def look_for_damage(self) -> None:
        """Checks the serving set's files, so that GetVersions lists damage that a replica has
        found.
        """
        for target, version in (
            (epb.WEIGHT_TARGET_POLICY, self.versions.policy),
            (epb.WEIGHT_TARGET_DRAFTER, self.versions.drafter),
        ):
            try:
                await asyncio.to_thread(self._spool.check, target, version)
            except DataLoss as error:
                log.error("what serves is damaged", error=str(error))

    @property
    def _there(self) -> list[Replica]:
        """The available replicas. Raises Unavailable if there is none."""
        if not (there := self._fleet.ready):
            raise Unavailable("every replica of the gateway is starting again")
        return there

    def _canaries(self, leased: Collection[int]) -> list[Replica]:
        """The available replicas. The first one has a worker without a trainer's lease."""

        def all_leased(replica: Replica) -> bool:
            place = replica.place
            return place.workers == sum(map(place.holds, leased))

        return sorted(self._there, key=all_leased)

    async def _judged(
        self, there: list[Replica], versions: VersionSet, mode: int, leased: Collection[int]
    ) -> Replica:
        """Returns the replica that serves the set first. If its workers are lost during the test,
        the next replica tries. Raises a refusal, and the last loss if no replica is left.
        """
        *before, last = there
        for replica in before:
            try:
                await self._serve(replica, versions, mode, leased, judge=True)
                return replica
            except WeightsError as error:
                if error.reason != LOST:
                    raise
                log.warning("no verdict of a replica", name=replica.place.name, error=str(error))
        await self._serve(last, versions, mode, leased, judge=True)
        return last

    async def _serve(
        self,
        replica: Replica,
        versions: VersionSet,
        mode: int,
        leased: Collection[int],
        *,
        judge: bool,
        starting: bool = False,
    ) -> None:
        place = replica.place
        request = pb.ServeSetRequest(
            versions=versions_to_proto(versions),
            mode=mode,  # type: ignore[arg-type]
            leased_workers=[
                worker - place.first_worker for worker in leased if place.holds(worker)
            ],
            judge=judge,
        )
        serve, deadline_s = replica.inner.ServeSet, patient(COMMAND_DEADLINE_S)
        for target in (epb.WEIGHT_TARGET_POLICY, epb.WEIGHT_TARGET_DRAFTER):
            deadline_s += self._deadline_s(target, part_version(versions, target))
        try:
            await replica.ask(serve, request, deadline_s, starting=starting)
        except DeadlineExceeded as error:  # its serving set is unknown
            self._fleet.replace(replica)
            raise Unavailable(f"{replica.place.name} is replaced: {error}") from error

    def _deadline_s(self, target: int, version: int) -> float:
        """Deadline for the load of a version, by its bytes and the machine's load."""
        manifest = self._spool.manifest(target, version)
        return patient(push_deadline_s(manifest.total_bytes if manifest else 0))

    async def _take_back(self, tried: list[Replica]) -> None:
        """Makes these replicas serve the former set. A replica that cannot is ended, and loads that
        set at its start.
        """
        mode = epb.PAUSE_MODE_IN_PLACE
        for replica in tried:
            try:
                await self._serve(replica, self.versions, mode, (), judge=False)
            except Unavailable:
                continue  # an unavailable replica loads the set at its return
            except PacelineError as error:
                log.error("a set cannot be taken back", error=str(error), name=replica.place.name)
                self._fleet.replace(replica)

    def _check(self, answers: Collection[object]) -> None:
        """Raises the first refusal, and Unavailable if no replica has answered."""
        away = [one for one in answers if isinstance(one, Unavailable)]
        for answer in answers:
            if (error := refused(answer)) is not None:
                raise error
            if isinstance(answer, BaseException) and answer not in away:
                raise answer
        if away and len(away) == len(answers):
            raise away[0]
