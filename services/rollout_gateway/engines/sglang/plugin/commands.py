"""Executes the commands of the worker protocol on one SGLang scheduler process, and hooks its loop:
start, incoming commands, finish rule, outgoing chunks.

Every rank executes a command; rank 0 answers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.errors import FailedPrecondition
from paceline.services.rollout_gateway.engines import nouns
from paceline.services.rollout_gateway.engines.requests import control
from paceline.services.rollout_gateway.engines.sglang.plugin import arms
from paceline.services.rollout_gateway.engines.sglang.plugin.process import Plugin
from paceline.services.rollout_gateway.engines.sglang.plugin.runtimes import swapped
from paceline.services.rollout_gateway.engines.worker.process import answer
from paceline.speculators.shift import shift_over
from paceline.trajectory import Target, VersionSet
from paceline.v1 import engine_pb2 as pb

MEMORY = ["weights", "kv_cache", "cuda_graph"]
"""SGLang's names of all memory that it can release."""


class SchedulerEngine(Plugin):
    """Implements CommandedEngine of engines/base.py with SGLang's scheduler."""

    def execute(self, payload: bytes) -> None:
        """Execute one command between two rounds.

        A rejected command gets an error as its answer. An exception of SGLang itself ends the
        process.
        """
        command = pb.WorkerCommand.FromString(payload)
        if self.peer is not None:
            self.peer.execute(self, command)
        else:
            answer(self, command, self.queue_chunks)
        if command.HasField("shutdown"):
            self.scheduler.gracefully_exit = True

    def enqueue(self, request: nouns.Request) -> None:
        control.check_held(self._released)
        control.check_arm(request.forced_arm, self.arms.arms)
        control.check_capabilities("sglang", self.info.capabilities, request)
        self.grammars.check(request.sampling)
        sequence = self.admission.sequence(request)
        rid = arms.rid_of(request.request_id, next(self.numbers))
        tracked = self.requests[rid] = arms.Tracked(sequence, self.versions.drafter, rid)
        self.scheduler.handle_generate_request(arms.as_sglang_request(tracked, self.cache_key(rid)))

    def abort(self, request_ids: frozenset[int] | None) -> list[nouns.Chunk]:
        """End requests now; later results of the running round are not reported.

        The plugin sends their last chunks, so the returned list is empty.
        """
        from sglang.srt.managers.io_struct import AbortReq

        ids = {rid: one.request.request_id for rid, one in self.requests.items()}
        for rid in [rid for rid in ids if request_ids is None or ids[rid] in request_ids]:
            self.end(rid, nouns.Finish.ABORT)
            self.scheduler.abort_request(AbortReq(rid=rid))
        return []

    def pause(self, mode: nouns.PauseMode) -> list[nouns.Chunk]:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        if mode is nouns.PauseMode.ABORT:
            self.abort(None)
        kind = "retract" if mode is nouns.PauseMode.RETRACT else "in_place"
        self.scheduler.pause_generation(PauseGenerationReqInput(mode=kind))
        return []

    def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        asked = ContinueGenerationReqInput(torch_empty_cache=False)
        self.scheduler.continue_generation(asked)

    def prepare_weights(self, target: Target, version: int, path: Path, profile: str = "") -> None:
        """Prepare a version; a policy must have the profile that SGLang was started with.

        Raises MissingCapability for another profile: SGLang has no second copy of the policy to
        convert.
        """
        if target is Target.POLICY and profile != self.spec.profile:
            raise nouns.missing("sglang", nouns.Capability.PROFILES)
        self.weights.prepare(target, version, path)

    def commit_weights(self, versions: VersionSet, mode: nouns.PauseMode) -> list[nouns.Chunk]:
        """Serve a set of versions; the mode applies only to a change of the policy.

        Raises the errors of PreparedVersions.changes. Raises RuntimeError when SGLang does not load
        the weights or keeps old keys and values; the process must then end.
        """
        changes, over = self.weights.prepared.changes(versions), self.versions.drafter
        retract = Target.POLICY in changes and mode is nouns.PauseMode.RETRACT
        retract &= not self._released  # nothing runs then, and nothing is cached
        if Target.POLICY in changes and mode is nouns.PauseMode.ABORT:
            self.abort(None)
        was_paused = self.scheduler._engine_paused
        if retract:
            self.pause(nouns.PauseMode.RETRACT)
        self.weights.commit(versions)
        if not self._released:
            self.weights.load_committed(self._updater)
        if retract:
            if not self.scheduler.flush_cache(empty_cache=False):
                raise RuntimeError(f"SGLang kept keys and values of the old weights at {versions}")
            if not was_paused:
                self.resume()

        if Target.POLICY in changes:
            waiting = {req.rid for req in self.scheduler.waiting_queue}
            for rid, tracked in self.requests.items():  # past the prefill, old keys and values stay
                tracked.sequence.stale = not retract and rid not in waiting
        self._relabel()
        for target, new in changes.items():
            self.arms.renew(target, shift_over(new.shift, over))
        return []

    def abort_weights(self, target: Target, version: int) -> None:
        self.weights.prepared.forget(target, version)

    def force_arm(self, arm: str) -> None:
        self.arms.force(arm)

    def learn_arms(self, reports: Sequence[pb.ArmStats]) -> None:
        self.arms.learn(reports)

    def quarantine(self, withheld: pb.Quarantine) -> None:
        """Bar arms, and stop prefix reuse where the quarantine requires it.

        Without reuse, each new or waiting request has its own namespace of the prefix cache.
        """
        self.arms.barred = frozenset(withheld.arms)
        self.reuses = not withheld.reuse
        self._relabel()

    def release_memory(self) -> int:
        """Release device memory; returns the growth of free memory on the device, in bytes.

        No request may be running, since SGLang would fail otherwise.
        """
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        self._check_memory()
        control.check_idle(len(self.requests))
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
        self.weights.load_committed(self._updater)

    @property
    def _updater(self) -> Any:
        return self.scheduler.weight_updater

    @property
    def _released(self) -> bool:
        """Whether SGLang has released its memory."""
        return bool(self._updater.offload_tags)

    def flush_cache(self) -> None:
        control.check_idle(len(self.requests))
        if not self.scheduler.flush_cache(empty_cache=False):
            message = "SGLang did not flush its cache"
            raise FailedPrecondition(message, seen=len(self.requests), allowed="no request")

    def _relabel(self) -> None:
        """Update SGLang's version string, and the prefix namespace of requests that wait for
        prefill.
        """
        self.scheduler.record_weight_version_change(arms.cache_key(self.versions))
        for req in self.scheduler.waiting_queue:
            tracked: arms.Tracked | None = self.requests.get(req.rid)
            if tracked is not None:
                req.extra_key = self.cache_key(req.rid)
                tracked.drafter_version = self.versions.drafter

    def _check_memory(self) -> None:
        if nouns.Capability.RELEASE_MEMORY not in self.info.capabilities:
            raise nouns.missing("sglang", nouns.Capability.RELEASE_MEMORY)


# ---- hooks of the scheduler loop


def received(plugin: SchedulerEngine, original: Any, receiver: Any) -> Any:
    """AROUND SchedulerRequestReceiver._pull_raw_reqs: add the gateway's commands to SGLang's
    requests.

    SGLang then passes both to every rank.
    """
    if plugin.peer is None:
        return original(receiver)
    commands = plugin.between_rounds([receiver.recv_from_tokenizer, receiver.recv_from_rpc])
    return [*original(receiver), *commands]


def processed(
    plugin: SchedulerEngine, original: Any, scheduler: Any, recv_reqs: Sequence[Any]
) -> Any:
    """AROUND Scheduler.process_input_requests: execute commands (bytes), and leave the rest to
    SGLang.
    """
    for payload in recv_reqs:
        if isinstance(payload, bytes):
            plugin.execute(payload)
    return original(scheduler, [one for one in recv_reqs if not isinstance(one, bytes)])


def forwarding(
    plugin: SchedulerEngine, original: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND TpModelWorker.forward_batch_generation: record the target's batch for the sampler."""
    if worker.is_draft_worker or batch is None:
        return original(worker, batch, *args, **kwargs)
    with swapped(plugin, "batch", batch):
        return original(worker, batch, *args, **kwargs)


def finishing(plugin: SchedulerEngine, original: Any, req: Any, new_accepted_len: int = 1) -> None:
    """AROUND Req.update_finish_state: end the gateway's requests by the embedded engine's rule."""
    tracked = plugin.requests.get(req.rid)
    if tracked is None or req.finished() or req.to_finish:
        original(req, new_accepted_len)
        return
    plugin.settle()
    tracked.sequence.copied = req.cached_tokens
    if tracked.sequence.error:  # the grammar failed: later draws are not reported
        tracked.sequence.finish = nouns.Finish.ERROR
    else:
        tracked.sequence.end_scored()
        if tracked.sequence.finish is None:
            before = len(tracked.sequence.tokens)
            tracked.confirm(req.output_ids, strict=plugin.rank == 0)
            if not tracked.request.probe:
                plugin.tokens_emitted += len(tracked.sequence.tokens) - before
    finish = tracked.sequence.finish
    if finish is None:
        return
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH, FINISH_MATCHED_TOKEN

    req.finished_len = len(tracked.sequence.tokens) - len(tracked.request.response)
    if finish in (nouns.Finish.LENGTH, nouns.Finish.ERROR):
        req.finished_reason = FINISH_LENGTH(length=req.finished_len)
    else:
        req.finished_reason = FINISH_MATCHED_TOKEN(matched=tracked.sequence.tokens[-1])


def streaming(
    plugin: SchedulerEngine,
    original: Any,
    streamer: Any,
    reqs: Sequence[Any],
    return_logprob: bool,
    skip_req: Any = None,
    is_idle_batch: bool = False,
) -> Any:
    """AROUND _stream_output_generation: send chunks to the gateway, not to SGLang's tokenizer."""
    for req in reqs:
        if req is not skip_req:
            _stream_one(plugin, req)
    return original(streamer, [], return_logprob, skip_req, is_idle_batch)


def _stream_one(plugin: SchedulerEngine, req: Any) -> None:
    tracked = plugin.requests.get(req.rid)
    if req.finished():
        req.finished_output = True
    if tracked is None:
        return
    tracked.sequence.copied = req.cached_tokens
    if not req.finished():
        if tracked.request.stream and len(tracked.sequence.tokens) > tracked.sequence.reported:
            plugin.queue_chunks([tracked.sequence.chunk()])
        return

    if tracked.sequence.finish is not None:
        plugin.end(req.rid)
    else:
        why = f"RESOURCE_EXHAUSTED: SGLang ended the request: {req.finished_reason.to_json()}"
        plugin.end(req.rid, nouns.Finish.ERROR, why)


def start(plugin: SchedulerEngine, scheduler: Any) -> None:
    """BEFORE Scheduler.run_event_loop: start the plugin."""
    plugin.start(scheduler)
