"""A reader gets every token once, also when another worker continues the request."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.local.patience import patient
from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb


def chunk(
    start: int,
    tokens: list[int],
    *,
    last: bool = False,
    version: int = 0,
    finish: tpb.FinishReason = tpb.FINISH_REASON_UNSPECIFIED,
) -> pb.TokenChunk:
    span = tpb.VersionSpan(start=start, end=start + len(tokens), policy_version=version)
    finish = tpb.FINISH_REASON_STOP if last else finish
    return pb.TokenChunk(
        request_id=1,
        token_ids=tokens,
        behavior_logprobs=[float(-token) for token in tokens],
        version_spans=[span] if tokens else [],
        finish_reason=finish,
        speculation=tpb.SpeculationStats(drafted_tokens=3, proposed_at=[3], accepted_at=[0])
        if finish
        else None,
        smallest_gap=1.0 if finish else 0.0,
    )


def cut(tokens: list[int], sizes: list[int]) -> list[pb.TokenChunk]:
    chunks, start = [], 0
    for size in sizes:
        chunks.append(chunk(start, tokens[start : start + size]))
        start = min(start + size, len(tokens))
    return [*chunks, chunk(start, tokens[start:], last=True)]


# outcomes of a try: it sends pieces of the given sizes; then it is lost with its unsent tokens,
# or it is suspended and sends all its tokens
tries = st.lists(st.tuples(st.lists(st.integers(1, 4), max_size=3), st.booleans()), max_size=4)


@settings(max_examples=200, deadline=None)
@given(tries=tries)
def test_whatever_becomes_of_its_tries_a_request_has_every_token_once(
    tries: list[tuple[list[int], bool]],
) -> None:
    tokens = list(range(10, 22))
    generation = Generation(pb.EngineRequest(request_id=1), None)
    at, drafted, owners = 0, 0, list[int]()  # the try that drew each token
    for number, (sizes, loses) in enumerate(tries):
        for size in sizes:
            piece = tokens[at : at + size][: len(tokens) - 1 - at]
            generation.accept(chunk(at, piece, version=number))
            at, owners = at + len(piece), owners + [number] * len(piece)
        if loses:
            generation.lose_worker()
        else:
            piece = tokens[at : at + 1][: len(tokens) - 1 - at]
            ended = chunk(at, piece, version=number, finish=tpb.FINISH_REASON_ABORT)
            generation.suspend_try(ended)
            at, owners, drafted = at + len(piece), owners + [number] * len(piece), drafted + 3
        assert list(generation.request.response_token_ids) == tokens[:at]
        assert not generation.finished
    last = chunk(at, tokens[at:], version=99, finish=tpb.FINISH_REASON_STOP)
    generation.accept(last)
    owners += [99] * (len(tokens) - at)
    whole = generation.whole
    assert list(whole.token_ids) == tokens
    assert list(whole.behavior_logprobs) == [float(-token) for token in tokens]
    told = [
        (n, span.policy_version)
        for span in whole.version_spans
        for n in range(span.start, span.end)
    ]
    assert told == list(enumerate(owners))
    assert whole.finish_reason == tpb.FINISH_REASON_STOP
    assert whole.speculation.drafted_tokens == drafted + 3
    assert list(whole.speculation.proposed_at) == [whole.speculation.drafted_tokens]
    assert generation.tries == sum(loses for _, loses in tries)


def test_the_counters_of_a_suspended_request_are_told_with_its_end() -> None:
    generation = Generation(pb.EngineRequest(request_id=1, prompt_token_ids=[5, 6]), None)
    first = chunk(0, [7, 8], finish=tpb.FINISH_REASON_ABORT)
    first.smallest_gap, first.time_to_first_token_s, first.cached_prompt_tokens = 0.25, 3.0, 1
    generation.suspend_try(first)
    assert generation.whole.finish_reason == tpb.FINISH_REASON_UNSPECIFIED
    assert not generation.whole.HasField("speculation")
    second = chunk(2, [9], finish=tpb.FINISH_REASON_LENGTH)
    second.smallest_gap, second.cached_prompt_tokens = 0.5, 4
    generation.accept(second)
    whole = generation.whole
    assert (whole.smallest_gap, whole.time_to_first_token_s) == (0.25, 3.0)
    assert whole.cached_prompt_tokens == 2  # the prompt's, whatever else was cached


def test_a_suspended_request_whose_numbers_are_worthless_ends() -> None:
    generation = Generation(pb.EngineRequest(request_id=1), None)
    bad = chunk(0, [1, 2], finish=tpb.FINISH_REASON_ABORT)
    bad.behavior_logprobs[1] = math.nan
    generation.suspend_try(bad)
    assert generation.whole.finish_reason == tpb.FINISH_REASON_ERROR


async def test_a_slow_reader_gets_merged_news() -> None:
    generation = Generation(pb.EngineRequest(request_id=1), None)
    for piece in cut([1, 2, 3, 4], [1, 1, 1]):
        generation.accept(piece)
    async with asyncio.timeout(patient(10)):
        news = [piece async for piece in generation.chunks()]
    assert [list(piece.token_ids) for piece in news] == [[1, 2, 3, 4]]
    assert generation.whole.finish_reason == tpb.FINISH_REASON_STOP


async def test_news_are_told_at_once_while_the_reader_waits_and_the_last_ones_to_the_reader() -> (
    None
):
    generation = Generation(pb.EngineRequest(request_id=1), None)
    first, *middle, last = cut([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 1, 2, 1])
    said, read = list[list[int]](), list[list[int]]()
    takes = True

    def take(piece: pb.TokenChunk) -> bool:
        if takes:
            said.append(list(piece.token_ids))
        return takes

    async with asyncio.timeout(1):
        news = generation.chunks()
        generation.accept(first)
        read.append(list((await anext(news)).token_ids))
        generation.set_direct_reader(take)
        generation.accept(middle[0])  # the reader is busy: nothing may overtake it
        read.append(list((await anext(news)).token_ids))
        waiting = asyncio.ensure_future(anext(news))
        await asyncio.sleep(0)  # it has begun to wait
        generation.accept(middle[1])
        takes = False
        generation.accept(middle[2])
        takes = True
        generation.accept(middle[3])  # the woken reader reads first
        read.append(list((await waiting).token_ids))
        generation.accept(last)
        read += [list(one.token_ids) async for one in news]
    assert said == [[4]]
    assert read == [[1], [2, 3], [5, 6, 7], [8]]
    assert list(generation.whole.token_ids) == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_what_goes_wrong_with_news_told_at_once_is_raised_where_they_are_read() -> None:
    generation = Generation(pb.EngineRequest(request_id=1), None)

    def take(piece: pb.TokenChunk) -> bool:
        raise ZeroDivisionError

    generation.set_direct_reader(take)
    waiting = asyncio.ensure_future(anext(generation.chunks()))
    await asyncio.sleep(0)
    generation.accept(chunk(0, [1]))
    with pytest.raises(ZeroDivisionError):
        await waiting


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


async def test_the_scores_of_a_prompt_are_told_once_however_often_its_request_goes_on() -> None:
    score = pb.PromptScore(logprob=-1.0, rank=2)
    for told_first in (True, False):
        generation = Generation(pb.EngineRequest(request_id=1, prompt_token_ids=[5, 6, 7]), 0)
        first = chunk(0, [8], finish=tpb.FINISH_REASON_ABORT)
        first.prompt_scores.extend([score, score] if told_first else [])
        generation.suspend_try(first)
        last = chunk(1, [9], last=True)
        last.prompt_scores.extend([score, score])
        generation.accept(last)
        assert len(generation.whole.prompt_scores) == 2
        assert [one async for one in generation.chunks()][-1].prompt_scores == [score, score]
