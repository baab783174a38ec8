"""Executes the commands of the worker protocol on one SGLang scheduler process.

Every rank executes a command; rank 0 answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import FailedPrecondition
from paceline.services.rollout_gateway.engines import nouns
from paceline.services.rollout_gateway.engines.requests import control
from paceline.services.rollout_gateway.engines.sglang.plugin.tracked import (
    Tracked,
    as_sglang_request,
    cache_key,
    rid_of,
)
from paceline.services.rollout_gateway.engines.sglang.plugin.weights import check_rounding
from paceline.services.rollout_gateway.engines.worker.peer import answer
from paceline.speculators.shift import shift_over
from paceline.trajectory import Target, VersionSet
from paceline.v1 import engine_pb2 as pb

if TYPE_CHECKING:
    from paceline.services.rollout_gateway.engines.sglang.plugin.process import Plugin


MEMORY = ["weights", "kv_cache", "cuda_graph"]
"""SGLang's names of all memory that it can release."""


def obey(plugin: Plugin, payload: bytes) -> None:
    """Execute one command between two rounds.

    A rejected command gets an error as its answer. An exception of SGLang itself ends the process.
    """
    command = pb.WorkerCommand.FromString(payload)
    engine = SchedulerEngine(plugin)
    if plugin.peer is not None:
        plugin.peer.obey(engine, command)
    else:
        answer(engine, command, plugin.tell)
    if command.HasField("shutdown"):
        plugin.scheduler.gracefully_exit = True


class SchedulerEngine:
    """Implements CommandedEngine of engines/base.py with SGLang's scheduler."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin

    @property
    def versions(self) -> VersionSet:
        return self._plugin.versions

    @property
    def load(self) -> nouns.EngineLoad:
        return self._plugin.load

    def enqueue(self, request: nouns.Request) -> None:
        plugin = self._plugin
        control.check_held(self._released)
        control.check_arm(request.forced_arm, plugin.arms.arms)
        control.check_capabilities("sglang", plugin.info.capabilities, request)
        plugin.grammars.check(request.sampling)
        sequence = plugin.admission.sequence(request)
        rid = rid_of(request.request_id, next(plugin.numbers))
        tracked = plugin.requests[rid] = Tracked(sequence, plugin.versions.drafter, rid)
        plugin.scheduler.handle_generate_request(as_sglang_request(tracked, plugin.cache_key(rid)))

    def abort(self, request_ids: frozenset[int] | None) -> list[nouns.Chunk]:
        """End requests now; later results of the running round are not reported.

        The plugin sends their last chunks, so the returned list is empty.
        """
        from sglang.srt.managers.io_struct import AbortReq

        plugin = self._plugin
        chosen = [
            rid
            for rid, one in plugin.requests.items()
            if request_ids is None or one.request.request_id in request_ids
        ]
        for rid in chosen:
            plugin.end(rid, nouns.Finish.ABORT)
            plugin.scheduler.abort_request(AbortReq(rid=rid))
        return []

    def pause(self, mode: nouns.PauseMode) -> list[nouns.Chunk]:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        if mode is nouns.PauseMode.ABORT:
            self.abort(None)
        kind = "retract" if mode is nouns.PauseMode.RETRACT else "in_place"
        self._plugin.scheduler.pause_generation(PauseGenerationReqInput(mode=kind))
        return []

    def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        asked = ContinueGenerationReqInput(torch_empty_cache=False)
        self._plugin.scheduler.continue_generation(asked)

    def prepare_weights(self, target: Target, version: int, path: Path, profile: str = "") -> None:
        """Prepare a version; a policy must have the profile that SGLang was started with.

        Raises MissingCapability for another profile: SGLang has no second copy of the policy to
        convert.
        """
        if target is Target.POLICY and profile != self._plugin.spec.profile:
            raise nouns.missing("sglang", nouns.Capability.PROFILES)
        self._plugin.weights.prepare(target, version, path, self._tried)

    def commit_weights(self, versions: VersionSet, mode: nouns.PauseMode) -> list[nouns.Chunk]:
        """Serve a set of versions; the mode applies only to a change of the policy.

        Raises the errors of PreparedVersions.changes. Raises RuntimeError when SGLang does not load
        the weights or keeps old keys and values; the process must then end.
        """
        plugin = self._plugin
        changes, over = plugin.weights.prepared.changes(versions), plugin.versions.drafter
        retract = Target.POLICY in changes and mode is nouns.PauseMode.RETRACT
        retract &= not self._released  # nothing runs then, and nothing is cached
        if Target.POLICY in changes and mode is nouns.PauseMode.ABORT:
            self.abort(None)
        was_paused = plugin.scheduler._engine_paused
        if retract:
            self.pause(nouns.PauseMode.RETRACT)
        plugin.weights.commit(versions)
        if not self._released:
            plugin.weights.load_committed(self._updater)
        if retract:
            if not plugin.scheduler.flush_cache(empty_cache=False):
                raise RuntimeError(f"SGLang kept keys and values of the old weights at {versions}")
            if not was_paused:
                self.resume()

        if Target.POLICY in changes:
            self._mark(stale=not retract)
        self._relabel()
        for target, new in changes.items():
            plugin.arms.renew(target, shift_over(new.shift, over))
        return []

    def abort_weights(self, target: Target, version: int) -> None:
        self._plugin.weights.prepared.forget(target, version)

    def force_arm(self, arm: str) -> None:
        self._plugin.arms.force(arm)

    def quarantine(self, withheld: nouns.Withheld) -> None:
        """Bar arms, and stop prefix reuse where the quarantine requires it.

        Without reuse, each new or waiting request has its own namespace of the prefix cache.
        """
        plugin = self._plugin
        plugin.arms.barred = frozenset(withheld.arms)
        plugin.reuses = not withheld.reuse
        self._relabel()

    def release_memory(self) -> int:
        """Release device memory; returns the growth of free memory on the device, in bytes.

        No request may be running, since SGLang would fail otherwise.
        """
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        self._check_memory()
        control.check_idle(len(self._plugin.requests))
        if self._released:
            return 0
        free, _ = torch.cuda.mem_get_info()
        self._updater.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=MEMORY))
        return max(torch.cuda.mem_get_info()[0] - free, 0)

    def resume_memory(self) -> None:
        """Restore memory. Weights return from the host's copy; versions committed meanwhile load
        then.
        """
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        self._check_memory()
        if self._released:
            self._updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=MEMORY))
        self._plugin.weights.load_committed(self._updater)

    def _tried(self, target: Target, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check the rounding of a version, unless the weights are released.

        Released weights have no memory for rounding. An update that fails later ends the process,
        which restarts with the serving set.
        """
        if not self._released:
            check_rounding(self._updater, target, tensors, self._plugin.weights.ranks)

    @property
    def _updater(self) -> Any:
        return self._plugin.scheduler.weight_updater

    @property
    def _released(self) -> bool:
        """Whether SGLang has released its memory."""
        return bool(self._updater.offload_tags)

    def flush_cache(self) -> None:
        plugin = self._plugin
        control.check_idle(len(plugin.requests))
        if not plugin.scheduler.flush_cache(empty_cache=False):
            raise FailedPrecondition(
                "SGLang did not flush its cache", seen=len(plugin.requests), allowed="no request"
            )

    def _mark(self, *, stale: bool) -> None:
        """Mark whether requests past their prefill keep keys and values of an earlier policy."""
        waiting = {req.rid for req in self._plugin.scheduler.waiting_queue}
        for rid, tracked in self._plugin.requests.items():
            tracked.sequence.stale = stale and rid not in waiting

    def _relabel(self) -> None:
        """Update SGLang's version string, and the prefix namespace of requests that wait for
        prefill.
        """
        plugin = self._plugin
        plugin.scheduler.record_weight_version_change(cache_key(plugin.versions))
        for req in plugin.scheduler.waiting_queue:
            tracked: Tracked | None = plugin.requests.get(req.rid)
            if tracked is not None:
                req.extra_key = plugin.cache_key(req.rid)
                tracked.drafter_version = plugin.versions.drafter

    def _check_memory(self) -> None:
        if nouns.Capability.RELEASE_MEMORY not in self._plugin.info.capabilities:
            raise nouns.missing("sglang", nouns.Capability.RELEASE_MEMORY)
