"""Converts worker protocol messages to engine nouns and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from paceline import errors
from paceline.errors import InvalidInput
from paceline.messages import from_message, stats_to_proto, to_message, versions_to_proto
from paceline.trajectory import Target, VersionSet, VersionSpan
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb
from rollout_gateway.bandits.evidence import ArmReport, Evidence
from rollout_gateway.engines.nouns import (
    Chunk,
    EngineInfo,
    EngineLoad,
    Finish,
    MemoryTag,
    PauseMode,
    PrefixStats,
    Request,
    RoundSplit,
    RowLayout,
)
from rollout_gateway.engines.sampling import UNSEEDED, Sampling

FINISH = {
    Finish.STOP: tpb.FINISH_REASON_STOP,
    Finish.LENGTH: tpb.FINISH_REASON_LENGTH,
    Finish.ABORT: tpb.FINISH_REASON_ABORT,
    Finish.ERROR: tpb.FINISH_REASON_ERROR,
}
PAUSE_MODES = {
    pb.PAUSE_MODE_IN_PLACE: PauseMode.IN_PLACE,
    pb.PAUSE_MODE_RETRACT: PauseMode.RETRACT,
    pb.PAUSE_MODE_ABORT: PauseMode.ABORT,
}
MEMORY_TAGS = {
    pb.MEMORY_TAG_WEIGHTS: MemoryTag.WEIGHTS,
    pb.MEMORY_TAG_KV_CACHE: MemoryTag.KV_CACHE,
    pb.MEMORY_TAG_CUDA_GRAPH: MemoryTag.CUDA_GRAPH,
}
TARGETS = {pb.WEIGHT_TARGET_POLICY: Target.POLICY, pb.WEIGHT_TARGET_DRAFTER: Target.DRAFTER}

_SAMPLING = tuple(field.name for field in dataclasses.fields(Sampling))


def pause_mode(mode: pb.PauseMode) -> PauseMode:
    """Raises InvalidInput for unknown modes."""
    if mode not in PAUSE_MODES:
        raise InvalidInput(
            "unknown pause mode", seen=int(mode), allowed=[str(known) for known in PauseMode]
        )
    return PAUSE_MODES[mode]


def target(value: pb.WeightTarget) -> Target:
    """Raises InvalidInput for targets an engine does not serve."""
    if value not in TARGETS:
        raise InvalidInput(
            "an engine does not serve this target",
            seen=int(value),
            allowed=[str(t) for t in Target],
        )
    return TARGETS[value]


def memory_tags(values: Sequence[pb.MemoryTag]) -> tuple[MemoryTag, ...]:
    """Raises InvalidInput for unknown tags."""
    unknown = [int(value) for value in values if value not in MEMORY_TAGS]
    if unknown:
        raise InvalidInput(
            "unknown memory tag", seen=unknown, allowed=[str(tag) for tag in MemoryTag]
        )
    return tuple(MEMORY_TAGS[value] for value in values)


def ready_to(
    info: EngineInfo, worker_index: int, pid: int, versions: VersionSet, head_hash: str
) -> pb.WorkerReady:
    return pb.WorkerReady(
        worker_index=worker_index,
        pid=pid,
        versions=versions_to_proto(versions),
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        max_sequence_tokens=info.max_sequence_tokens,
        arms=info.arms,
        capabilities=sorted(info.capabilities),
        lm_head_hash=head_hash,
        row_width=info.rows.width,
        row_layers=info.rows.layers,
        row_convention=info.rows.convention,
        device_tflops=info.device_tflops,
    )


def failed_to(error: errors.PacelineError) -> pb.CommandFailed:
    return pb.CommandFailed(reason=error.reason, message=str(error), family=type(error).reason)


def error_from(failed: pb.CommandFailed, sender: str = "") -> errors.PacelineError:
    """The error a worker reports, of its own class; InternalError for a class that is not known
    here.
    """
    kind = errors.FAMILIES.get(failed.family, errors.InternalError)
    return kind(f"{sender}{failed.message}", reason=failed.reason)


def rows_from(message: pb.WorkerReady) -> RowLayout:
    return RowLayout(message.row_width, message.row_layers, message.row_convention)


def spans_from(messages: Sequence[tpb.VersionSpan], shift: int = 0) -> tuple[VersionSpan, ...]:
    """Spans moved by `shift` tokens; neighbours of one version become one."""
    merged: list[VersionSpan] = []
    for span in messages:
        start, end = span.start + shift, span.end + shift
        if merged and merged[-1].policy_version == span.policy_version and merged[-1].end == start:
            merged[-1] = VersionSpan(merged[-1].start, end, span.policy_version)
        else:
            merged.append(VersionSpan(start, end, span.policy_version))
    return tuple(merged)


_READ: dict[str, Callable[[Any], Any]] = {
    "top_p": lambda mass: mass or 1.0,
    "repetition_penalty": lambda factor: factor or 1.0,
    "stop": tuple,
    "stop_token_ids": tuple,
    "logit_bias": lambda bias: tuple(sorted(bias.items())),
}
"""Parameters whose wire form is another: repeated fields, and 0 for what was left out."""


def sampling_from(message: tpb.SamplingParams) -> Sampling:
    """What is left out gets the value that switches it off."""
    values: dict[str, Any] = {
        name: _READ[name](getattr(message, name)) if name in _READ else getattr(message, name)
        for name in _SAMPLING
    }
    if not message.HasField("seed"):
        values["seed"] = UNSEEDED
    return Sampling(**values)


def sampling_to(sampling: Sampling) -> tpb.SamplingParams:
    values: dict[str, Any] = {name: getattr(sampling, name) for name in _SAMPLING}
    if sampling.seed == UNSEEDED:
        del values["seed"]
    return tpb.SamplingParams(**values | {"logit_bias": dict(sampling.logit_bias)})


def request_from(message: pb.EngineRequest) -> Request:
    return Request(
        request_id=message.request_id,
        prompt=tuple(message.prompt_token_ids),
        sampling=sampling_from(message.sampling),
        stream=message.stream,
        capture=message.capture,
        forced_arm=message.forced_arm,
    )


def request_to(request: Request) -> pb.EngineRequest:
    return pb.EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt,
        sampling=sampling_to(request.sampling),
        stream=request.stream,
        capture=request.capture,
        forced_arm=request.forced_arm,
    )


def chunk_to(chunk: Chunk) -> pb.TokenChunk:
    message = pb.TokenChunk(
        request_id=chunk.request_id,
        token_ids=chunk.token_ids,
        behavior_logprobs=chunk.behavior_logprobs,
        version_spans=[
            tpb.VersionSpan(start=s.start, end=s.end, policy_version=s.policy_version)
            for s in chunk.version_spans
        ],
        top_logprobs=[
            pb.TopLogprobs(token_ids=[t for t, _ in row], logprobs=[p for _, p in row])
            for row in chunk.top_logprobs
        ],
    )
    if chunk.finish is not None:
        message.finish_reason = FINISH[chunk.finish]
        message.error = chunk.error
        message.speculation.CopyFrom(stats_to_proto(chunk.speculation))
        message.cached_prompt_tokens = chunk.cached_prompt_tokens
        message.smallest_gap = chunk.smallest_gap
        message.time_to_first_token_s = chunk.time_to_first_token_s
        message.matched_stop = chunk.matched_stop
    return message


def arm_to(report: ArmReport) -> pb.ArmStats:
    return to_message(report, pb.ArmStats)


def evidence_to(evidence: Evidence) -> pb.BanditEvidence:
    return to_message(evidence, pb.BanditEvidence)


def evidence_from(message: pb.BanditEvidence) -> Evidence:
    return from_message(Evidence, message)


def split_to(split: RoundSplit) -> pb.RoundSplit:
    return to_message(split, pb.RoundSplit)


def split_from(message: pb.RoundSplit) -> RoundSplit:
    return from_message(RoundSplit, message)


def prefixes_to(stats: PrefixStats) -> pb.PrefixStats:
    return to_message(stats, pb.PrefixStats)


def health_to(load: EngineLoad, versions: VersionSet) -> pb.WorkerHealth:
    return pb.WorkerHealth(
        running=load.running,
        waiting=load.waiting,
        versions=versions_to_proto(versions),
        tokens_emitted=load.tokens_emitted,
        busy_s=load.busy_s,
        speculation=stats_to_proto(load.speculation),
        arms=[arm_to(report) for report in load.arms],
        rows_dropped=load.rows_dropped,
        rejected_left_out=load.rejected_left_out,
        evidence=evidence_to(load.evidence),
        prefixes=prefixes_to(load.prefixes),
        split=split_to(load.split),
    )
