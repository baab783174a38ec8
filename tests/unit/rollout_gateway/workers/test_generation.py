"""A reader gets every token once, also when the request is repeated on another worker."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb
from rollout_gateway.workers.generation import Generation


def chunk(start: int, tokens: list[int], *, last: bool = False) -> pb.TokenChunk:
    return pb.TokenChunk(
        request_id=1,
        token_ids=tokens,
        behavior_logprobs=[float(-token) for token in tokens],
        version_spans=[tpb.VersionSpan(start=start, end=start + len(tokens), policy_version=0)]
        if tokens
        else [],
        finish_reason=tpb.FINISH_REASON_STOP if last else tpb.FINISH_REASON_UNSPECIFIED,
    )


def cut(tokens: list[int], sizes: list[int]) -> list[pb.TokenChunk]:
    chunks, start = [], 0
    for size in sizes:
        chunks.append(chunk(start, tokens[start : start + size]))
        start = min(start + size, len(tokens))
    return [*chunks, chunk(start, tokens[start:], last=True)]


sizes = st.lists(st.integers(1, 4), max_size=6)


@settings(max_examples=80, deadline=None)
@given(first=sizes, second=sizes, lost_after=st.integers(0, 6))
def test_a_repeated_request_continues_where_the_reader_stands(
    first: list[int], second: list[int], lost_after: int
) -> None:
    tokens = list(range(10, 22))
    generation = Generation(pb.EngineRequest(request_id=1), None)
    for piece in cut(tokens, first)[: min(lost_after, len(first))]:
        generation.accept(piece)
    generation.restart()
    for piece in cut(tokens, second):
        generation.accept(piece)
    assert list(generation.whole.token_ids) == tokens
    assert list(generation.whole.behavior_logprobs) == [float(-token) for token in tokens]
    covered = [
        index for span in generation.whole.version_spans for index in range(span.start, span.end)
    ]
    assert covered == list(range(len(tokens)))
    assert generation.whole.finish_reason == tpb.FINISH_REASON_STOP


def test_other_tokens_on_the_second_try_are_an_error() -> None:
    generation = Generation(pb.EngineRequest(request_id=1), None)
    generation.accept(chunk(0, [1, 2]))
    generation.restart()
    generation.accept(chunk(0, [1, 3]))
    assert generation.whole.finish_reason == tpb.FINISH_REASON_ERROR


async def test_a_slow_reader_gets_merged_news() -> None:
    generation = Generation(pb.EngineRequest(request_id=1), None)
    for piece in cut([1, 2, 3, 4], [1, 1, 1]):
        generation.accept(piece)
    async with asyncio.timeout(1):
        news = [piece async for piece in generation.chunks()]
    assert [list(piece.token_ids) for piece in news] == [[1, 2, 3, 4]]
    assert generation.whole.finish_reason == tpb.FINISH_REASON_STOP


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_ends_the_request(value: float) -> None:
    generation = Generation(pb.EngineRequest(request_id=1), None)
    generation.accept(chunk(0, [1, 2]))
    broken = chunk(2, [3, 4])
    broken.behavior_logprobs[1] = value
    generation.accept(broken)
    generation.accept(chunk(4, [5], last=True))
    assert generation.whole.finish_reason == tpb.FINISH_REASON_ERROR
    assert generation.whole.error.startswith("DATA_LOSS: ")
    assert list(generation.whole.token_ids) == [1, 2]
