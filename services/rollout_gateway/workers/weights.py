"""Decides what the engine workers serve: keeps the serving set of the gateway, loads new weights,
and disables paths that an audit found inexact.
"""

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from paceline import trajectory
from paceline.arm_names import OFF
from paceline.errors import DataLoss, InvalidInput, PacelineError, Unavailable, WeightsError
from paceline.local.news import tell_supervisor
from paceline.messages import versions_from_proto, versions_to_proto
from paceline.models.profiles import ROUNDED
from paceline.services.rollout_gateway import metrics
from paceline.services.rollout_gateway.config import CanaryConfig
from paceline.services.rollout_gateway.engines.nouns import Capability
from paceline.services.rollout_gateway.workers.canary import Canary
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.services.rollout_gateway.workers.router import Router
from paceline.telemetry import Attributes, get_logger, names, span
from paceline.trajectory import VersionSet
from paceline.v1 import engine_pb2 as pb
from paceline.weights import Spool

VERSIONS_REMEMBERED = 16
log = get_logger(__name__)


class WorkerWeights:
    """The gateway's WeightHooks: distributes versions to the workers. A worker that cannot follow
    is replaced.
    """

    def __init__(self, router: Router, spool: Spool, canary: CanaryConfig | None = None) -> None:
        self._canary = Canary(router, spool, canary or CanaryConfig())
        self._router = router
        self._spool = spool
        self._swap = asyncio.Lock()  # a starting worker never sees half a commit
        self._head_hashes: dict[int, str] = {}  # policy version -> lm_head hash
        self.versions = spool.sets.serves
        # set, then replaced, when a worker finds the serving set damaged
        self._damage = asyncio.Event()

    def lm_head_hash(self, policy_version: int) -> str:
        """Hash of the head of a recent policy version; empty for other versions."""
        return self._head_hashes.get(policy_version, "")

    async def load_committed(self, process: WorkerProcess) -> None:
        """Load the serving set on a starting worker. Raises DataLoss when the set is damaged, so
        that the worker serves no other policy instead.
        """
        async with self._swap:
            self._remember(process.versions.policy, process.ready.lm_head_hash)
            try:
                self._spool.sets.check()
                if process.versions == self.versions:
                    return
                await self._commit_one(process, self.versions, pb.PAUSE_MODE_IN_PLACE)
            except DataLoss:
                self._damage.set()
                self._damage = asyncio.Event()
                raise
            self._remember(self.versions.policy, self._spooled_hash(self.versions.policy))

    async def damaged(self) -> NoReturn:
        """Raises Unavailable once a starting worker finds the serving set damaged."""
        await self._damage.wait()
        raise Unavailable("what serves is damaged", seen="a worker that cannot start")

    async def take_memory(self, process: WorkerProcess) -> None:
        """Restore the memory of a returning worker. Raises WeightsError when it then serves another
        set, and the worker's errors.
        """
        async with self._swap:
            await process.restore_memory()
            answer = await process.ask(pb.WorkerCommand(get_health=pb.GetHealth()))
            served = versions_from_proto(answer.health.versions)
            if served != process.versions:
                message = f"{process.name} serves another set"
                raise WeightsError(message, seen=served, allowed=process.versions)

    async def on_prepared(self, target: int, version: int, path: Path) -> None:
        """Load a version beside the serving version on every worker. A policy is loaded under the
        serving profile. The first failure fails the push.
        """
        profile = self.versions.profile if target == pb.WEIGHT_TARGET_POLICY else ""
        command = _prepare(target, version, profile, path)
        name = pb.WeightTarget.Name(target)
        about: Attributes = {names.TARGET: name, names.WEIGHTS_VERSION: version}
        with span(names.WEIGHTS_PREPARE, about):
            async with self._swap:
                processes = self._router.processes()
                answers = await self._router.ask_all(command, processes)
                for process, answer in zip(processes, answers, strict=True):
                    if not isinstance(answer, BaseException):
                        process.prepared.add((target, version, profile))
                    elif not isinstance(answer, Unavailable):
                        raise answer  # a lost worker loads the committed set when it restarts

    async def on_commit(
        self, versions: VersionSet, mode: int, leased: Collection[int], *, judge: bool | None = None
    ) -> None:
        """Serve a set on every worker: first on a canary, then on all other workers in parallel. A
        leased worker is no canary. `judge`: whether to use a canary; None: with two or more
        workers.

        Raises WeightsError when the canary refuses the set, and the workers' error when none could
        serve it. The serving set is then unchanged.
        """
        sides = {names.POLICY_VERSION: versions.policy, names.DRAFTER_VERSION: versions.drafter}
        about: Attributes = {names.SET_SEQ: versions.seq, names.PROFILE: versions.profile, **sides}
        with span(names.WEIGHTS_COMMIT, about):
            async with self._swap:
                judged = len(self._router.seats) > 1 if judge is None else judge
                commit = partial(self._commit_one, versions=versions, mode=mode)
                first = None
                if judged:
                    able = [one for one in self._router.processes() if one.index not in leased]
                    first = await self._canary.test_set(able, self.versions, versions, commit)
                processes = [one for one in self._router.processes() if one is not first]
                answers = await asyncio.gather(*map(commit, processes), return_exceptions=True)
                failures = [answer for answer in answers if isinstance(answer, BaseException)]
                if first is None and failures and len(failures) == len(processes):
                    raise failures[0]
                self.versions = versions
                self._remember(versions.policy, self._spooled_hash(versions.policy))
                for process, answer in zip(processes, answers, strict=True):
                    if isinstance(answer, BaseException):
                        message = "a commit failed on an engine worker; it is replaced"
                        log.error(message, worker=process.index, error=answer)
                        process.kill()

    async def on_abort(self, target: int, version: int) -> None:
        """Drop a prepared version."""
        aborted = pb.AbortWeights(target=pb.WeightTarget.Name(target), version=version)
        async with self._swap:
            for process in self._router.processes():
                process.forget(target, version)
            await self._router.ask_all(pb.WorkerCommand(abort_weights=aborted))

    async def _commit_one(self, process: WorkerProcess, versions: VersionSet, mode: int) -> None:
        """Commit a set on one worker. A damaged drafter is left out with a warning: the worker is
        then slower, not wrong.
        """
        served, policy = process.versions, versions.policy
        if (policy, versions.profile) != (served.policy, served.profile):
            await self._prepare_one(process, pb.WEIGHT_TARGET_POLICY, policy, versions.profile)
        if versions.drafter != process.versions.drafter:
            try:
                await self._prepare_one(process, pb.WEIGHT_TARGET_DRAFTER, versions.drafter)
            except DataLoss as error:
                left_out = f"drafts without drafter version {versions.drafter}: {error}"
                tell_supervisor("impaired", f"{process.name} {left_out}")
                versions = replace(versions, drafter=process.versions.drafter)
        name = pb.PauseMode.Name(mode or pb.PAUSE_MODE_IN_PLACE)
        commit = pb.CommitWeights(versions=versions_to_proto(versions), mode=name)
        if mode == pb.PAUSE_MODE_ABORT:
            # No request is sent between this call and the command, since the commit ends no later
            # request. The suspended requests continue under the new policy.
            self._router.seats[process.index].suspend("commit")
        await process.ask(pb.WorkerCommand(commit_weights=commit))
        process.versions = versions
        process.forget(pb.WEIGHT_TARGET_POLICY, versions.policy)
        process.forget(pb.WEIGHT_TARGET_DRAFTER, versions.drafter)

    async def _prepare_one(
        self, process: WorkerProcess, target: int, version: int, profile: str = ""
    ) -> None:
        """Load a version on one worker. Raises DataLoss when the version is damaged or gone."""
        if (target, version, profile) in process.prepared:
            return
        await asyncio.to_thread(self._spool.check, target, version)
        if self._spool.has(target, version):
            path = self._spool.path(target, version)
            await process.ask(_prepare(target, version, profile, path))

    def _spooled_hash(self, policy_version: int) -> str:
        try:
            manifest = self._spool.manifest(pb.WEIGHT_TARGET_POLICY, policy_version)
        except PacelineError as error:
            log.warning("manifest of the serving policy cannot be read", error=str(error))
            return ""
        return manifest.lm_head_hash if manifest is not None else ""

    def _remember(self, policy_version: int, head_hash: str) -> None:
        if head_hash:
            self._head_hashes[policy_version] = head_hash
        for old in sorted(self._head_hashes)[:-VERSIONS_REMEMBERED]:
            if old != 0:
                del self._head_hashes[old]


def _prepare(target: int, version: int, profile: str, path: Path) -> pb.WorkerCommand:
    name, place = pb.WeightTarget.Name(target), str(path)
    prepared = pb.PrepareWeights(target=name, version=version, path=place, profile=profile)
    return pb.WorkerCommand(prepare_weights=prepared)


_ARM, _NUMBERS = trajectory.ARM_PATH, trajectory.NUMBERS_PATH
_PLAIN, _DRAFTED, _REUSED = trajectory.PLAIN_PATH, trajectory.DRAFTED_PATH, trajectory.REUSED_PATH
_ALONE = (_PLAIN, _DRAFTED, _REUSED, trajectory.SWAPPED_PATH)


class Quarantined:
    """Paths that no worker uses; the set only grows."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.paths: tuple[str, ...] = ()

    async def add(self, paths: Iterable[str]) -> list[str]:
        """Disable paths on every worker; returns the paths that the engine cannot disable. Raises
        InvalidInput for an invalid path name, and the workers' errors.
        """
        wanted = list(dict.fromkeys(paths))
        for path in wanted:
            _check(path)
        new = [path for path in wanted if path not in self.paths]
        if new:
            self.paths += tuple(new)
            for path in new:
                log.error("path_quarantined", path=path)
                metrics.QUARANTINED.record(1, path=path)
            for answer in await self._router.ask_all(self._command()):
                # A lost worker gets the command when it restarts.
                if isinstance(answer, PacelineError) and not isinstance(answer, Unavailable):
                    raise answer
        return [path for path in wanted if self._unmet(path)]

    async def send_paths(self, process: WorkerProcess) -> None:
        """Send the disabled paths to a starting worker, before its first request."""
        if self.paths:
            await process.ask(self._command())

    def _unmet(self, path: str) -> bool:
        """Whether the engine cannot disable the path. The coordinator handles a commit's own paths:
        a swap and a profile.
        """
        profiles = ROUNDED if Capability.PROFILES in self._router.ready.capabilities else ()
        rounding = path.startswith(_NUMBERS)
        return path == _PLAIN or (rounding and path.removeprefix(_NUMBERS) not in profiles)

    def _command(self) -> pb.WorkerCommand:
        arms = [path.removeprefix(_ARM) for path in self.paths if path.startswith(_ARM)]
        if _DRAFTED in self.paths:
            arms = [arm for arm in self._router.ready.arms if arm != OFF]
        withheld = pb.Quarantine(arms=arms, reuse=_REUSED in self.paths)
        return pb.WorkerCommand(quarantine=withheld)


def _check(path: str) -> None:
    named = any(path.startswith(kind) and path != kind for kind in (_ARM, _NUMBERS))
    if path not in _ALONE and not named:
        allowed = f"{', '.join(_ALONE)}, {_ARM}<name> or {_NUMBERS}<format>"
        raise InvalidInput("an audit knows no such path", seen=path, allowed=allowed)
