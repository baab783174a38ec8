"""What each command of the worker protocol means to one SGLang scheduler process.

Every rank obeys; rank 0 answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from paceline.errors import FailedPrecondition, InvalidInput, PacelineError
from paceline.trajectory import Target, VersionSet
from paceline.v1 import engine_pb2 as pb
from rollout_gateway.engines.base import Capability, Chunk, Finish, MemoryTag, PauseMode, missing
from rollout_gateway.engines.sglang.plugin import capture
from rollout_gateway.engines.sglang.plugin.requests import as_sglang_request, cache_key
from rollout_gateway.engines.sglang.plugin.tracked import Tracked, rid_of
from rollout_gateway.engines.worker import wire

if TYPE_CHECKING:
    from rollout_gateway.engines.sglang.plugin.process import Plugin


def obey(plugin: Plugin, payload: bytes) -> None:
    """One command, between two rounds.

    A refusal is answered; what SGLang itself raises ends the process.
    """
    command = pb.WorkerCommand.FromString(payload)
    try:
        event = _carry_out(plugin, command)
    except PacelineError as error:
        event = pb.WorkerEvent(failed=wire.failed_to(error))
    if event is not None and command.command_id and plugin.peer is not None:
        event.command_id = command.command_id
        plugin.peer.send(event)
    if command.HasField("shutdown"):
        plugin.scheduler.gracefully_exit = True


def _carry_out(plugin: Plugin, command: pb.WorkerCommand) -> pb.WorkerEvent | None:
    match command.WhichOneof("command"):
        case "enqueue":
            for message in command.enqueue.requests:
                enqueue(plugin, message)
            return None
        case "abort":
            abort(plugin, frozenset(command.abort.request_ids) or None)
            return None
        case "pause":
            pause(plugin, wire.pause_mode(command.pause.mode))
        case "continue":
            resume(plugin)
        case "prepare_weights":
            prepare = command.prepare_weights
            plugin.weights.prepare(wire.target(prepare.target), prepare.version, Path(prepare.path))
        case "commit_weights":
            commit = command.commit_weights
            commit_weights(
                plugin, wire.versions_from(commit.versions), wire.pause_mode(commit.mode)
            )
        case "abort_weights":
            plugin.weights.forget(
                wire.target(command.abort_weights.target), command.abort_weights.version
            )
        case "set_speculation":
            plugin.arms.force(command.set_speculation.forced_arm)
        case "set_capture":
            capture.set_capture(plugin, command.set_capture.enabled)
        case "release_memory":
            release_memory(plugin, wire.memory_tags(command.release_memory.tags))
        case "resume_memory":
            resume_memory(plugin, wire.memory_tags(command.resume_memory.tags))
        case "flush_cache":
            flush_cache(plugin)
        case "merge_evidence":
            if wire.versions_from(command.merge_evidence.versions) == plugin.versions:
                plugin.arms.merge(wire.evidence_from(command.merge_evidence.evidence))
            return None
        case "get_health":
            return pb.WorkerEvent(health=wire.health_to(plugin.load, plugin.versions))
        case "shutdown":
            abort(plugin, None)
        case None:
            raise InvalidInput("a command without content", seen=command.command_id)
        case unknown:
            assert_never(unknown)
    return pb.WorkerEvent(done=pb.CommandDone(versions=wire.versions_to(plugin.versions)))


def enqueue(plugin: Plugin, message: pb.EngineRequest) -> None:
    """Queue one request, or end it at once with what is wrong."""
    try:
        request = wire.request_from(message)
        plugin.arms.check(request.forced_arm)
        _check_capture(plugin, request.capture)
        if request.sampling.json_schema:
            raise missing("sglang", Capability.JSON_SCHEMA)
        tracked = Tracked(plugin.admission.sequence(request), plugin.versions.drafter)
    except PacelineError as error:
        refused = f"{error.reason}: {error}"
        plugin.tell(Chunk(message.request_id, (), (), (), finish=Finish.ERROR, error=refused))
        return
    plugin.requests[rid_of(request.request_id)] = tracked
    plugin.scheduler.handle_generate_request(as_sglang_request(tracked, plugin.versions))


def abort(plugin: Plugin, request_ids: frozenset[int] | None) -> None:
    """End requests now (None: all).

    What SGLang still does for them in the running round is not told.
    """
    from sglang.srt.managers.io_struct import AbortReq

    chosen = [
        t
        for t in plugin.requests.values()
        if request_ids is None or t.request.request_id in request_ids
    ]
    for tracked in chosen:
        rid = rid_of(tracked.request.request_id)
        plugin.end(rid, Finish.ABORT)
        plugin.scheduler.abort_request(AbortReq(rid=rid))


def pause(plugin: Plugin, mode: PauseMode) -> None:
    """Stop decoding between two rounds."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    if mode is PauseMode.ABORT:
        abort(plugin, None)
    kind = "retract" if mode is PauseMode.RETRACT else "in_place"
    plugin.scheduler.pause_generation(PauseGenerationReqInput(mode=kind))


def resume(plugin: Plugin) -> None:
    """Decode again."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    plugin.scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))


def commit_weights(plugin: Plugin, versions: VersionSet, mode: PauseMode) -> None:
    """Serve a set from the next round on; see Engine.commit_weights.

    The mode concerns a change of the policy.
    """
    changes = plugin.weights.changes(versions)
    retract = Target.POLICY in changes and mode is PauseMode.RETRACT
    retract |= Target.DRAFTER in changes and plugin.spec.drafter_swap == "retract"
    if Target.POLICY in changes and mode is PauseMode.ABORT:
        abort(plugin, None)
    was_paused = plugin.scheduler._engine_paused
    if retract:
        pause(plugin, PauseMode.RETRACT)
    plugin.weights.commit(plugin.scheduler.weight_updater, versions)
    if retract:
        if not plugin.scheduler.flush_cache(empty_cache=False):
            raise RuntimeError(f"SGLang kept keys and values of the old weights at {versions}")
        if not was_paused:
            resume(plugin)
    _relabel(plugin)
    for target in changes:
        plugin.arms.forget(target)


def _relabel(plugin: Plugin) -> None:
    """Version string of SGLang, and the prefix namespace of requests that still wait for their
    prefill.
    """
    key = cache_key(plugin.versions)
    plugin.scheduler.record_weight_version_change(key)
    for req in plugin.scheduler.waiting_queue:
        tracked: Tracked | None = plugin.requests.get(req.rid)
        if tracked is not None:
            req.extra_key = key
            tracked.drafter_version = plugin.versions.drafter


def release_memory(plugin: Plugin, tags: Sequence[MemoryTag]) -> None:
    """Give GPU memory back; see Engine.release_memory.

    Nothing runs: SGLang would fail otherwise.
    """
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

    _check_memory(plugin)
    _check_idle(plugin)
    asked = ReleaseMemoryOccupationReqInput(tags=[str(tag) for tag in tags] or None)
    plugin.scheduler.weight_updater.release_memory_occupation(asked)


def resume_memory(plugin: Plugin, tags: Sequence[MemoryTag]) -> None:
    """Take released GPU memory again; weights come back from the host's copy."""
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

    _check_memory(plugin)
    updater = plugin.scheduler.weight_updater
    wanted = [str(tag) for tag in tags] or sorted(updater.offload_tags)
    if held := sorted(set(wanted) - set(updater.offload_tags)):
        raise FailedPrecondition(
            "this memory was not released", seen=held, allowed=sorted(updater.offload_tags)
        )
    updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=wanted))


def flush_cache(plugin: Plugin) -> None:
    """Forget cached prefixes."""
    _check_idle(plugin)
    if not plugin.scheduler.flush_cache(empty_cache=False):
        raise FailedPrecondition(
            "SGLang did not flush its cache", seen=len(plugin.requests), allowed="no request"
        )


def _check_idle(plugin: Plugin) -> None:
    if plugin.requests:
        raise FailedPrecondition("requests run; abort them or wait", seen=len(plugin.requests))


def _check_memory(plugin: Plugin) -> None:
    if Capability.RELEASE_MEMORY not in plugin.info.capabilities:
        raise missing("sglang", Capability.RELEASE_MEMORY)


def _check_capture(plugin: Plugin, wanted: bool) -> None:
    if wanted and Capability.CAPTURE not in plugin.info.capabilities:
        raise missing("sglang", Capability.CAPTURE)
