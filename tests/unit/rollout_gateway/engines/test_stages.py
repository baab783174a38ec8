"""The stages of a request in an engine: their sum, and their largest number."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from paceline.services.rollout_gateway.engines.requests.sequence import DECODE_STAGES, Stages
from paceline.v1.engine_pb2 import StageTime


def ticking(times: list[int]) -> Stages:
    """Stages that find these times, in this order."""
    left: Iterator[int] = iter(times)
    return Stages(lambda: next(left))


def decoded(
    arm: str, start_ns: int, end_ns: int, busy_s: float, rounds: int, tokens: int
) -> StageTime:
    one = StageTime(stage="decode", arm=arm, policy_version=3, start_ns=start_ns, end_ns=end_ns)
    one.MergeFrom(StageTime(busy_s=busy_s, rounds=rounds, tokens=tokens))
    return one


def test_a_wait_a_prompt_and_rounds_of_two_arms_share_all_of_a_requests_time() -> None:
    stages = ticking([10, 15, 40, 50, 70, 75])
    stages.admitted()
    stages.cached()
    stages.round("off", 3, 1)
    stages.round("eagle:5_1_6", 3, 4)
    stages.round("off", 3, 1)
    assert stages.times(prompt_tokens=7) == (
        StageTime(stage="queue", start_ns=10, end_ns=15, busy_s=5e-9),
        StageTime(stage="prefill", start_ns=15, end_ns=40, busy_s=25e-9, tokens=7),
        decoded("off", 40, 75, 15e-9, 2, 2),
        decoded("eagle:5_1_6", 50, 70, 20e-9, 1, 4),
    )
    assert sum(one.busy_s for one in stages.times(7)) == pytest.approx((75 - 10) / 1e9)


def test_only_the_first_slot_and_the_first_cached_prompt_count() -> None:
    clock = count(100)
    stages = Stages(lambda: next(clock))
    for _ in range(3):
        stages.admitted()
        stages.cached()
    queue, prefill = stages.times(1)
    assert (queue.start_ns, queue.end_ns, prefill.end_ns) == (100, 101, 102)


def test_an_engine_that_draws_with_the_prompt_has_its_first_token_in_the_prefill() -> None:
    stages = ticking([0, 30, 45])
    stages.round("off", 0, 1)
    stages.round("off", 0, 2)
    prefill, decode = stages.times(9)
    assert (prefill.stage, prefill.start_ns, prefill.end_ns) == ("prefill", 0, 30)
    assert (decode.start_ns, decode.end_ns, decode.busy_s, decode.tokens) == (30, 45, 15e-9, 3)


def test_tokens_that_come_one_by_one_are_of_one_round() -> None:
    clock = count()
    stages = Stages(lambda: next(clock))
    stages.cached()
    for number in range(3):
        stages.round("off", 0, 1, begins=number == 0)
    assert (stages.times(0)[-1].rounds, stages.times(0)[-1].tokens) == (1, 3)


def test_a_version_of_its_own_is_a_stage_of_its_own_up_to_a_bound() -> None:
    clock = count()
    stages = Stages(lambda: next(clock))
    stages.cached()
    for version in range(DECODE_STAGES + 5):
        stages.round("off", version, 1)
    _, *decode = stages.times(0)
    assert len(decode) == DECODE_STAGES
    assert sum(one.rounds for one in decode) == DECODE_STAGES + 5
    assert decode[-1].policy_version == DECODE_STAGES - 1
