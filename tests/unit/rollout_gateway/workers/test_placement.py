"""The worker that gets a request, and the idle time of a worker, without processes."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.local.patience import patient
from paceline.services.rollout_gateway.workers.generation import Generation
from paceline.services.rollout_gateway.workers.placement import (
    STICKY_FACTOR,
    STICKY_SLACK,
    Seat,
    choose,
)
from paceline.services.rollout_gateway.workers.process import WorkerProcess
from paceline.v1 import engine_pb2 as pb

_numbers = itertools.count(1)


def seats(*loads: int, gone: tuple[int, ...] = (), released: tuple[int, ...] = ()) -> list[Seat]:
    """Return serving seats with these numbers of requests."""
    made = []
    for index, load in enumerate(loads):
        process = None if index in gone else cast(WorkerProcess, object())
        seat = Seat(index, process, released=index in released)
        for _ in range(load):
            add(seat)
        made.append(seat)
    return made


def add(seat: Seat) -> Generation:
    generation = Generation(pb.EngineRequest(request_id=next(_numbers)), None)
    seat.add(generation)
    return generation


def place(made: list[Seat], prefer: int | None) -> Seat:
    chosen = choose(made, prefer)
    assert chosen is not None
    return chosen


def test_without_a_preference_the_least_loaded_gets_the_request() -> None:
    assert place(seats(3, 1, 2), None).index == 1
    assert place(seats(0, 0), None).index == 0


def test_the_next_turn_goes_where_its_cache_is() -> None:
    assert place(seats(0, 3, 1), 1).index == 1


@pytest.mark.parametrize("others", [(0,), (5,), (0, 4, 2)])
def test_a_worker_with_much_more_than_the_others_loses_its_sessions(
    others: tuple[int, ...],
) -> None:
    most = int(STICKY_FACTOR * sum(others) / len(others)) + STICKY_SLACK
    assert place(seats(most, *others), 0).index == 0
    moved = choose(seats(most + 1, *others), 0)
    assert len(moved.live) == min(others)


def test_a_single_worker_keeps_its_sessions_at_any_load() -> None:
    assert place(seats(50), 0).index == 0


def test_a_turn_whose_worker_is_gone_goes_to_another() -> None:
    assert place(seats(0, 3, gone=(0,)), 0).index == 1
    assert place(seats(0, 3), 7).index == 0


def test_a_released_worker_gets_no_request_while_another_serves() -> None:
    assert place(seats(0, 9, released=(0,)), None).index == 1
    assert place(seats(0, 9, released=(0,)), 0).index == 1
    assert place(seats(0, 9, 9, released=(0,), gone=(1,)), None).index == 2


def test_a_released_worker_serves_nobody_even_when_no_other_does() -> None:
    assert place(seats(2, 0, released=(0,), gone=(1,)), None).index == 1
    assert choose(seats(2, 1, released=(0, 1)), None) is None


def test_requests_wait_at_a_starting_worker_when_none_serves() -> None:
    assert place(seats(2, 1, gone=(0, 1)), None).index == 1


@given(
    places=st.lists(
        st.tuples(st.integers(0, 12), st.booleans(), st.booleans()), min_size=1, max_size=5
    ),
    prefer=st.none() | st.integers(0, 5),
)
def test_the_chosen_place_is_always_the_best_kind_there_is(
    places: list[tuple[int, bool, bool]], prefer: int | None
) -> None:
    made = seats(
        *(load for load, _, _ in places),
        gone=tuple(i for i, (_, gone, _) in enumerate(places) if gone),
        released=tuple(i for i, (_, _, out) in enumerate(places) if out),
    )

    def rank(seat: Seat) -> tuple[bool, bool]:
        return (seat.released, seat.process is None)

    chosen = choose(made, prefer)
    if chosen is None:
        assert all(seat.released for seat in made)
        return
    assert not chosen.released
    assert rank(chosen) == min(map(rank, made))
    if chosen.index != prefer:
        assert len(chosen.live) == min(
            len(seat.live) for seat in made if rank(seat) == rank(chosen)
        )


def test_a_place_is_idle_from_the_end_of_its_last_request() -> None:
    (seat,) = seats(0)
    born = seat.idle_since_s
    assert born is not None
    first, second = add(seat), add(seat)
    assert seat.idle_since_s is None
    seat.end(first.request.request_id)
    assert seat.idle_since_s is None
    seat.end(second.request.request_id)
    assert seat.idle_since_s is not None
    assert seat.idle_since_s >= born


def test_clearing_tells_what_was_sent_from_what_was_not() -> None:
    (seat,) = seats(0)
    sent = add(seat)
    seat.unsent.clear()
    unsent = add(seat)
    assert seat.clear() == ([sent], [unsent])
    assert (seat.live, seat.unsent) == ({}, [])
    assert seat.idle_since_s is not None


async def test_whoever_waits_for_idleness_is_told_once_nothing_has_run_for_long_enough() -> None:
    (seat,) = seats(1)
    (request_id,) = seat.live
    watchers = [asyncio.create_task(seat.idle_for(seconds)) for seconds in (0.05, 0.0)]
    await asyncio.sleep(0)
    assert not any(watcher.done() for watcher in watchers)
    ended = time.monotonic()
    seat.end(request_id)
    await asyncio.wait_for(watchers[1], patient(5))
    await asyncio.wait_for(watchers[0], patient(5))
    assert time.monotonic() - ended >= 0.045


async def test_a_request_in_between_starts_the_wait_for_idleness_again() -> None:
    (seat,) = seats(0)
    watcher = asyncio.create_task(seat.idle_for(0.1))
    await asyncio.sleep(0)
    generation = add(seat)
    seat.end(generation.request.request_id)
    again = seat.idle_since_s
    assert again is not None
    await asyncio.wait_for(watcher, patient(5))
    assert time.monotonic() - again >= 0.095


async def test_who_stops_waiting_for_idleness_is_forgotten() -> None:
    (seat,) = seats(1)
    watcher = asyncio.create_task(seat.idle_for(1))
    await asyncio.sleep(0)
    watcher.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watcher
    seat.clear()
    await asyncio.wait_for(seat.idle_for(0), patient(5))
