"""Every field of a message between gateway and worker survives the socket unchanged."""

from __future__ import annotations

import os
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import given
from hypothesis import strategies as st
from remote_engine import chunk_from

from paceline.messages import (
    from_message,
    stats_from_proto,
    stats_to_proto,
    to_message,
    versions_from_proto,
    versions_to_proto,
)
from paceline.services.rollout_gateway.engines.nouns import (
    Capability,
    Chunk,
    EngineInfo,
    Finish,
    Request,
    RoundSplit,
    RowLayout,
)
from paceline.services.rollout_gateway.engines.sampling import UNSEEDED, Sampling
from paceline.services.rollout_gateway.engines.worker import wire
from paceline.trajectory import DrawSpan, SpeculationStats, VersionSet, VersionSpan
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb

U32 = st.integers(0, 2**32 - 1)
FLOATS = st.floats(width=32, allow_nan=False)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 2**31 - 1),
    float: FLOATS,
    str: st.text(max_size=5),
    bool: st.booleans(),
}
TEXT = PLAIN[str]
PLAIN[pb.StageTime] = st.builds(
    pb.StageTime,
    stage=TEXT,
    arm=TEXT,
    policy_version=U32,
    start_ns=U32,
    end_ns=U32,
    busy_s=FLOATS,
    rounds=U32,
    tokens=U32,
)
TOPS = st.builds(
    pb.TopLogprobs, token_ids=st.lists(U32, max_size=3), logprobs=st.lists(FLOATS, max_size=3)
)
PLAIN[pb.PromptScore] = st.builds(pb.PromptScore, logprob=FLOATS, rank=U32, top=st.none() | TOPS)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Draw values of a type, including nested types."""
    if hint in PLAIN:
        return PLAIN[hint]
    arguments = get_args(hint)
    if isinstance(hint, types.UnionType):
        return st.one_of(*map(values, arguments))
    if hint is type(None):
        return st.none()
    if get_origin(hint) is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if get_origin(hint) is tuple:
        return st.tuples(*map(values, arguments))
    if get_origin(hint) is Mapping:
        return st.dictionaries(*map(values, arguments), max_size=3)
    if get_origin(hint) is frozenset:
        return st.frozensets(values(arguments[0]))
    if issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    assert is_dataclass(hint), hint
    return every_field(hint)


def every_field(kind: type[Any], **given_by: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Instances of a dataclass with all its fields drawn."""
    hints = get_type_hints(kind)
    drawn = {one.name: values(hints[one.name]) for one in fields(kind) if one.name not in given_by}
    return st.builds(kind, **drawn, **given_by)


def spans_of(lengths: list[int]) -> tuple[VersionSpan, ...]:
    """Neighbours of different versions."""
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    return tuple(
        VersionSpan(end - length, end, version)
        for version, (end, length) in enumerate(zip(ends, lengths, strict=True))
    )


def drawn_of(lengths: list[int]) -> tuple[DrawSpan, ...]:
    """Neighbours of different arms."""
    return tuple(
        DrawSpan(one.start, one.end, f"arm {one.policy_version}", "float32")
        for one in spans_of(lengths)
    )


LENGTHS = st.lists(st.integers(1, 9), max_size=4)
ON = st.floats(0.125, 8, width=32)  # 0 on the wire means: left out
SAMPLING = every_field(
    Sampling,
    seed=st.just(UNSEEDED) | st.integers(0, 2**64 - 1),
    top_p=ON,
    repetition_penalty=ON,
    allowed_token_ids=st.sets(U32, max_size=3).map(lambda ids: tuple(sorted(ids))),
    logit_bias=st.dictionaries(U32, FLOATS).map(lambda bias: tuple(sorted(bias.items()))),
)


@given(SAMPLING)
def test_sampling_comes_back(sampling: Sampling) -> None:
    message = tpb.SamplingParams.FromString(wire.sampling_to(sampling).SerializeToString())
    assert wire.sampling_from(message) == sampling


@given(every_field(Request, sampling=SAMPLING))
def test_a_request_comes_back(request: Request) -> None:
    message = pb.EngineRequest.FromString(wire.request_to(request).SerializeToString())
    assert wire.request_from(message) == request


def test_the_wire_names_the_same_parameters_as_the_engine() -> None:
    names = {one.name for one in fields(Sampling)}
    assert set(tpb.SamplingParams.DESCRIPTOR.fields_by_name) == names


@given(
    every_field(
        Chunk,
        finish=st.sampled_from(Finish),
        version_spans=LENGTHS.map(spans_of),
        draw_spans=LENGTHS.map(drawn_of),
    )
)
def test_the_last_chunk_comes_back(chunk: Chunk) -> None:
    assert chunk_from(pb.TokenChunk.FromString(wire.chunk_to(chunk).SerializeToString())) == chunk


@given(every_field(SpeculationStats))
def test_speculation_counters_come_back(stats: SpeculationStats) -> None:
    assert stats_from_proto(stats_to_proto(stats)) == stats


@given(every_field(VersionSet))
def test_a_version_set_comes_back(versions: VersionSet) -> None:
    assert versions_from_proto(versions_to_proto(versions)) == versions


@given(every_field(EngineInfo, rows=every_field(RowLayout)), U32, every_field(VersionSet))
def test_ready_says_every_fact(info: EngineInfo, index: int, versions: VersionSet) -> None:
    ready = wire.ready_to(info, index, versions, "hash")
    assert (ready.worker_index, ready.pid, ready.lm_head_hash) == (index, os.getpid(), "hash")
    assert versions_from_proto(ready.versions) == versions
    again = EngineInfo(
        ready.vocab_size,
        ready.hidden_size,
        ready.max_sequence_tokens,
        tuple(ready.arms),
        frozenset(map(Capability, ready.capabilities)),
        wire.rows_from(ready),
        ready.device_tflops,
    )
    assert again == info


@given(every_field(RoundSplit))
def test_a_round_split_comes_back(split: RoundSplit) -> None:
    assert from_message(RoundSplit, to_message(split, pb.RoundSplit)) == split
