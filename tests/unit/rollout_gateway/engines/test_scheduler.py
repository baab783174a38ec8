"""Slots stay dense, prompts are cached oldest first within the budget."""

from __future__ import annotations

from paceline.messages import stats_to_proto
from paceline.services.rollout_gateway.engines.embedded.prefill import Scheduler
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.sampling import Sampling


def sequence(number: int, length: int = 10) -> RunningSequence:
    return RunningSequence(
        Request(number, (0,) * length, Sampling(1, 8)), frozenset(), 8, length=length
    )


def numbers(scheduler: Scheduler) -> list[int]:
    return [one.request.request_id for one in scheduler.running]


def full(count: int, budget: int = 1000, lengths: tuple[int, ...] = ()) -> Scheduler:
    scheduler = Scheduler(count, budget)
    for number in range(count + 2):
        scheduler.waiting.append(sequence(number, lengths[number] if number < len(lengths) else 10))
    assert scheduler.admit() == range(count)
    return scheduler


def test_the_batch_fills_in_order_of_arrival_and_no_further() -> None:
    scheduler = full(4)
    assert numbers(scheduler) == [0, 1, 2, 3]
    assert scheduler.admit() == range(4, 4)
    assert len(scheduler.waiting) == 2


def test_holes_are_filled_from_the_end_and_moves_replay_to_the_same_batch() -> None:
    for gone in ({0}, {3}, {1, 2}, {0, 3}, {0, 1, 2, 3}, set()):
        scheduler = full(4)
        slots = numbers(scheduler)
        moves, freed = scheduler.remove(
            [one for one in scheduler.running if one.request.request_id in gone]
        )
        for source, destination, _ in moves:
            slots[destination] = slots[source]
        assert slots[: 4 - len(gone)] == numbers(scheduler)
        assert set(numbers(scheduler)) == {0, 1, 2, 3} - gone
        assert freed == range(4 - len(gone), 4)


def test_prefill_stays_within_its_budget_padding_included() -> None:
    scheduler = full(4, budget=60, lengths=(11, 21, 31, 5))
    assert scheduler.prefill_plan() == [(0, 10), (1, 20)]
    for slot, count in scheduler.prefill_plan():
        scheduler.running[slot].cached += count
    assert scheduler.ready() == [0, 1]
    assert scheduler.prefill_plan() == [(2, 30), (3, 4)]


def test_a_prompt_longer_than_the_budget_is_cached_in_pieces() -> None:
    scheduler = full(1, budget=8, lengths=(21,))
    pieces = []
    while plan := scheduler.prefill_plan():
        pieces.append(plan[0][1])
        scheduler.running[0].cached += plan[0][1]
    assert pieces == [8, 8, 4]
    assert scheduler.ready() == [0]


def test_a_drafted_round_whose_tokens_all_fall_behind_the_end_accepts_none() -> None:
    one = sequence(0)
    one.count("eagle:3_1_4", drafted=3, taken=0)
    assert one.speculation.accepted_tokens == 0
    assert one.speculation.drafted_tokens == 3
    stats_to_proto(one.speculation)
