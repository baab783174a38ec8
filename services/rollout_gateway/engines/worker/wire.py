"""Conversion between worker protocol messages and the engine's types."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from paceline import errors, messages
from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.engines import nouns
from paceline.services.rollout_gateway.engines.sampling import RANGES, UNSCORED, UNSEEDED, Sampling
from paceline.trajectory import Span, Target, VersionSet, runs
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

E = TypeVar("E", bound=Enum)


def _numbers(kind: type[E], wire_enum: Any, prefix: str) -> dict[Any, E]:
    """Maps the wire values of an enum to members of `kind`."""
    return {wire_enum.Value(f"{prefix}_{noun.name}"): noun for noun in kind}


_FINISHES = _numbers(nouns.Finish, tpb.FinishReason, "FINISH_REASON")
FINISH: dict[nouns.Finish, Any] = {noun: value for value, noun in _FINISHES.items()}
PAUSE_MODES = _numbers(nouns.PauseMode, pb.PauseMode, "PAUSE_MODE")
TARGETS = _numbers(Target, pb.WeightTarget, "WEIGHT_TARGET")

_SAMPLING = {field.name: field.default for field in dataclasses.fields(Sampling)}


def noun_of(members: Mapping[Any, E], value: int) -> E:
    """The member for a wire value.

    Raises InvalidInput for a value that no engine accepts.
    """
    if value not in members:
        allowed = [str(member) for member in members.values()]
        raise InvalidInput("no engine takes this value", seen=int(value), allowed=allowed)
    return members[value]


def ready_to(
    info: nouns.EngineInfo, worker_index: int, versions: VersionSet, head_hash: str
) -> pb.WorkerReady:
    return pb.WorkerReady(
        worker_index=worker_index,
        pid=os.getpid(),
        versions=messages.versions_to_proto(versions),
        lm_head_hash=head_hash,
        row_width=info.rows.width,
        row_layers=info.rows.layers,
        row_convention=info.rows.convention,
        **messages.shared_fields(info, pb.WorkerReady)
        | {"capabilities": sorted(info.capabilities)},
    )


def failed_to(error: errors.PacelineError) -> pb.CommandFailed:
    return pb.CommandFailed(reason=error.reason, message=str(error), family=type(error).reason)


def error_from(failed: pb.CommandFailed, sender: str = "") -> errors.PacelineError:
    """The error that a worker reports, in its own class; InternalError for an unknown class."""
    kind = errors.FAMILIES.get(failed.family, errors.InternalError)
    return kind(f"{sender}{failed.message}", reason=failed.reason)


def rows_from(message: pb.WorkerReady) -> nouns.RowLayout:
    return nouns.RowLayout(message.row_width, message.row_layers, message.row_convention)


def spans_from(kind: type[Span], spans: Sequence[Any], shift: int = 0) -> tuple[Span, ...]:
    """Spans shifted by `shift` tokens; equal neighbours are merged."""
    found = []
    for one, end in runs(kind, spans):
        span, start = messages.from_message(kind, one), one.start + shift
        found.append(dataclasses.replace(span, start=start, end=end + shift))
    return tuple(found)


def sampling_from(message: tpb.SamplingParams) -> Sampling:
    """Unset parameters, and 0 where it is out of range, get the value that disables them."""
    values: dict[str, Any] = {}
    for name, off in _SAMPLING.items():
        value = getattr(message, name)
        if isinstance(off, tuple):
            value = tuple(value)
        elif isinstance(off, float) and value == 0 and not RANGES[name].holds(0):
            value = off
        values[name] = value
    values["allowed_token_ids"] = tuple(sorted(set(message.allowed_token_ids)))
    values["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    if not message.HasField("seed"):
        values["seed"] = UNSEEDED
    if not message.HasField("prompt_logprobs"):
        values["prompt_logprobs"] = UNSCORED
    return Sampling(**values)


def sampling_to(sampling: Sampling) -> tpb.SamplingParams:
    values: dict[str, Any] = {name: getattr(sampling, name) for name in _SAMPLING}
    if sampling.seed == UNSEEDED:
        del values["seed"]
    if not sampling.scored:
        del values["prompt_logprobs"]
    return tpb.SamplingParams(**values | {"logit_bias": dict(sampling.logit_bias)})


def request_from(message: pb.EngineRequest) -> nouns.Request:
    return nouns.Request(
        request_id=message.request_id,
        prompt=tuple(message.prompt_token_ids),
        sampling=sampling_from(message.sampling),
        stream=message.stream,
        capture=message.capture,
        forced_arm=message.forced_arm,
        response=tuple(message.response_token_ids),
        probe=message.probe,
    )


def request_to(request: nouns.Request) -> pb.EngineRequest:
    fields = messages.shared_fields(request, pb.EngineRequest)
    fields["sampling"] = sampling_to(request.sampling)
    fields |= {"prompt_token_ids": request.prompt, "response_token_ids": request.response}
    return pb.EngineRequest(**fields)


_WHOLE = {"cached_prompt_tokens", "smallest_gap", "time_to_first_token_s"}
_ON_LAST = {"error", "speculation", "matched_stop", "stages", *_WHOLE}
"""Fields that only the last chunk of a request has."""


def chunk_to(chunk: nouns.Chunk) -> pb.TokenChunk:
    fields = messages.shared_fields(chunk, pb.TokenChunk) | {
        "version_spans": [messages.to_message(one, tpb.VersionSpan) for one in chunk.version_spans],
        "draw_spans": [messages.to_message(one, tpb.DrawSpan) for one in chunk.draw_spans],
        "top_logprobs": [alternatives_to(row) for row in chunk.top_logprobs],
    }
    if chunk.finish is None:
        return pb.TokenChunk(**{k: one for k, one in fields.items() if k not in _ON_LAST})
    fields["speculation"] = messages.stats_to_proto(chunk.speculation)
    return pb.TokenChunk(**fields, finish_reason=FINISH[chunk.finish])


def alternatives_to(row: Sequence[tuple[int, float]]) -> pb.TopLogprobs:
    return pb.TopLogprobs(token_ids=[t for t, _ in row], logprobs=[p for _, p in row])
