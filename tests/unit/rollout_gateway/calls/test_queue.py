"""Admission to the engine in virtual time: turns between keys, order within a key, limits,
time-outs, cancellation.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from drawn_cases import case_count
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.errors import ResourceExhausted
from paceline.services.rollout_gateway.calls.queue import FairQueue
from paceline.services.rollout_gateway.config import QueueConfig

KEYS = ("a", "b", "c")


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop with a manual clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def time(self) -> float:
        return self.now_s

    def settle(self) -> None:
        """Run until nothing is ready; every hand-over takes two or three turns of the loop."""
        for _ in range(6):
            self.run_until_complete(asyncio.sleep(0))

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        self.settle()


class World:
    """Requests over one queue: each waits in its own task and stays inside until its release."""

    def __init__(self, config: QueueConfig, running: int = 1) -> None:
        self.loop = VirtualLoop()
        self.queue = FairQueue(config, running)
        self.entered: list[int] = []
        self.refused: dict[int, ResourceExhausted] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._inside: dict[int, AsyncExitStack] = {}

    def come(self, key: str) -> int:
        """A new request; its number."""
        number = len(self.tasks)
        self.tasks[number] = self.loop.create_task(self._request(number, key))
        self.loop.settle()
        return number

    async def _request(self, number: int, key: str) -> None:
        held = AsyncExitStack()
        try:
            await held.enter_async_context(self.queue.place(key))
        except ResourceExhausted as error:
            self.refused[number] = error
        else:
            self.entered.append(number)
            self._inside[number] = held

    def leave(self, number: int) -> None:
        self.loop.run_until_complete(self._inside.pop(number).aclose())
        self.loop.settle()

    def leave_and_cancel(self, leaving: int, cancelled: int, *, cancel_first: bool) -> None:
        """Both before any other task runs: leaving does not wait for anything."""

        async def both() -> None:
            if cancel_first:
                self.tasks[cancelled].cancel()
            await self._inside.pop(leaving).aclose()
            if not cancel_first:
                assert cancelled not in self._inside
                self.tasks[cancelled].cancel()

        self.loop.run_until_complete(both())
        self.loop.settle()

    def cancel(self, number: int) -> None:
        self.tasks[number].cancel()
        self.loop.settle()

    def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        self.loop.settle()
        for number in list(self._inside):
            self.leave(number)
        assert (self.queue.running, self.queue.waiting) == (0, 0)
        self.loop.close()


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.close()


def make(worlds: list[World], running: int = 1, **keys: Any) -> World:
    worlds.append(World(configured(**keys), running))
    return worlds[-1]


def configured(per_key: int = 256, **keys: Any) -> QueueConfig:
    """Settings with another value of the class's constant `per_key`."""
    config = QueueConfig(**keys)
    vars(config)["per_key"] = per_key
    return config


def test_requests_enter_at_once_while_there_is_room(worlds: list[World]) -> None:
    world = make(worlds, running=3)
    numbers = [world.come("a") for _ in range(5)]
    assert world.entered == numbers[:3]
    assert (world.queue.running, world.queue.waiting) == (3, 2)


def test_the_configured_number_of_places_goes_before_the_engines(worlds: list[World]) -> None:
    worlds.append(World(QueueConfig(running=2), 3))
    for _ in range(3):
        worlds[0].come("a")
    assert worlds[0].queue.running == 2


def test_a_key_with_500_waiting_requests_delays_another_by_one_turn(worlds: list[World]) -> None:
    world = make(worlds, per_key=500)
    first = world.come("flood")
    flood = [world.come("flood") for _ in range(500)]
    late = world.come("other")
    world.leave(first)
    world.leave(flood[0])
    assert world.entered == [first, flood[0], late]


def test_keys_take_turns_and_each_keeps_its_order(worlds: list[World]) -> None:
    world = make(worlds)
    for key in "aaabbca":
        world.come(key)
    for index in range(7):
        world.leave(world.entered[index])
    assert world.entered == [0, 1, 3, 5, 2, 4, 6]


@pytest.mark.parametrize(
    ("limits", "reason", "seen"),
    [({"limit": 2}, "QUEUE_FULL", "2"), ({"per_key": 2}, "KEY_QUEUE_FULL", "2")],
)
def test_too_many_waiting_are_refused(
    worlds: list[World], limits: dict[str, int], reason: str, seen: str
) -> None:
    world = make(worlds, **limits)
    inside, *_ = [world.come("a") for _ in range(3)]
    refused = world.come("a")
    error = world.refused[refused]
    assert (error.reason, error.seen, error.allowed) == (reason, seen, seen)
    assert (world.queue.running, world.queue.waiting) == (1, 2)
    other = world.come("b")
    assert (other in world.refused) == ("limit" in limits)
    world.leave(inside)
    assert world.come("a") not in world.refused


def test_a_wait_ends_at_its_limit_and_leaves_no_trace(worlds: list[World]) -> None:
    world = make(worlds, wait_s=10)
    inside = world.come("a")
    early = world.come("a")
    world.loop.advance(4)
    late = world.come("b")
    world.loop.advance(5.9)
    assert not world.refused
    world.loop.advance(0.2)
    assert list(world.refused) == [early]
    error = world.refused[early]
    assert (error.reason, error.seen, error.allowed) == ("QUEUE_WAIT", "10.1 s", "10 s")
    world.loop.advance(4)
    assert list(world.refused) == [early, late]
    assert (world.queue.running, world.queue.waiting) == (1, 0)
    world.leave(inside)
    after = world.come("a")
    assert world.entered == [inside, after]


def test_the_alarm_of_one_who_left_wakes_the_next_in_time(worlds: list[World]) -> None:
    world = make(worlds, wait_s=10)
    world.come("a")
    gone = world.come("a")
    world.loop.advance(5)
    stays = world.come("a")
    world.cancel(gone)
    world.loop.advance(5)
    assert not world.refused
    world.loop.advance(5)
    assert list(world.refused) == [stays]


@pytest.mark.parametrize("cancel_first", [True, False])
def test_a_place_granted_to_a_cancelled_request_goes_on(
    worlds: list[World], cancel_first: bool
) -> None:
    world = make(worlds)
    inside, second, third = (world.come("a") for _ in range(3))
    world.leave_and_cancel(inside, second, cancel_first=cancel_first)
    assert world.entered == [inside, third]
    assert (world.queue.running, world.queue.waiting) == (1, 0)


def test_a_cancelled_request_costs_its_key_no_turn(worlds: list[World]) -> None:
    world = make(worlds)
    inside, second, third, other = (world.come(key) for key in "aaab")
    world.leave_and_cancel(inside, second, cancel_first=True)
    world.leave(third)
    assert world.entered == [inside, third, other]


def test_a_wait_that_ends_and_is_cancelled_in_one_turn_holds_nothing(worlds: list[World]) -> None:
    world = make(worlds, wait_s=10)
    inside, second = world.come("a"), world.come("a")
    world.loop.now_s += 10
    world.loop.call_soon(world.tasks[second].cancel)
    world.loop.settle()
    assert world.tasks[second].done()
    world.leave(inside)
    assert (world.queue.running, world.queue.waiting) == (0, 0)


def test_a_request_that_fails_inside_gives_its_place_back(worlds: list[World]) -> None:
    world = make(worlds)

    async def fail() -> None:
        async with world.queue.place("a"):
            raise ValueError("the engine")

    with pytest.raises(ValueError, match="the engine"):
        world.loop.run_until_complete(fail())
    assert world.come("a") in world.entered


@pytest.mark.parametrize(("turn_s", "advice_s"), [(0.01, 1.0), (3.0, 12.0), (40.0, 60.0)])
def test_a_refusal_says_when_those_before_will_have_entered(
    worlds: list[World], turn_s: float, advice_s: float
) -> None:
    world = make(worlds, limit=4, wait_s=1000)
    for _ in range(5):
        world.come("a")
    for index in range(20):
        world.loop.advance(turn_s)
        world.leave(world.entered[index])
        world.come("a")
    error = world.refused[world.come("b")]
    assert error.retry_after_s == pytest.approx(advice_s)


def test_the_advice_to_one_key_counts_its_own_line_and_the_turns_of_others(
    worlds: list[World],
) -> None:
    world = make(worlds, per_key=3, wait_s=1000)
    world.come("a")
    for key in "abbb":
        world.come(key)
    world.loop.advance(2.0)
    world.leave(0)
    world.come("a")
    for _ in range(3):
        world.come("a")
    assert len(world.refused) == 1
    (error,) = world.refused.values()
    assert error.retry_after_s == pytest.approx(2.0 * 6)
    alone = world.refused[world.come("b")]
    assert alone.retry_after_s == pytest.approx(2.0 * 6)


def test_a_standstill_raises_the_advice(worlds: list[World]) -> None:
    world = make(worlds, limit=1, wait_s=1000)
    world.come("a")
    world.come("a")
    assert world.refused[world.come("a")].retry_after_s == 1.0
    world.loop.advance(30)
    assert world.refused[world.come("a")].retry_after_s == pytest.approx(30)
    world.loop.advance(300)
    assert world.refused[world.come("a")].retry_after_s == 60.0


def test_quiet_hours_do_not_count_as_slow_turns(worlds: list[World]) -> None:
    world = make(worlds, limit=1, wait_s=1000)
    for pause_s in (2.0, 7200.0, 2.0):
        first, second = world.come("a"), world.come("a")
        world.loop.advance(2.0)
        world.leave(first)
        world.leave(second)
        world.loop.advance(pause_s)
    world.come("a")
    world.come("a")
    assert world.refused[world.come("a")].retry_after_s == pytest.approx(2.0)


class QueueMachine(RuleBasedStateMachine):
    """Checks against a model: lists of waiters by key, with keys in the order of their turns."""

    places, limit, per_key, wait_s = 2, 6, 4, 100.0

    def __init__(self) -> None:
        super().__init__()
        config = configured(self.per_key, limit=self.limit, wait_s=self.wait_s)
        self.world = World(config, self.places)
        self.inside: set[int] = set()
        self.entered: list[int] = []
        self.lines: OrderedDict[str, list[int]] = OrderedDict()
        self.came_s: dict[int, float] = {}
        self.refused: set[int] = set()

    def teardown(self) -> None:
        self.world.close()

    def fill(self) -> None:
        while self.lines and len(self.inside) < self.places:
            key, line = self.lines.popitem(last=False)
            number, rest = line[0], line[1:]
            if rest:
                self.lines[key] = rest
            self.inside.add(number)
            self.entered.append(number)

    def drop(self, number: int) -> None:
        for key, line in list(self.lines.items()):
            if number in line:
                line.remove(number)
                if not line:
                    del self.lines[key]

    def queued(self) -> list[int]:
        return sorted(number for line in self.lines.values() for number in line)

    @rule(key=st.sampled_from(KEYS))
    def come(self, key: str) -> None:
        number = self.world.come(key)
        self.came_s[number] = self.world.loop.now_s
        full = len(self.queued()) >= self.limit or len(self.lines.get(key, [])) >= self.per_key
        if len(self.inside) == self.places and full:
            self.refused.add(number)
            return
        self.lines.setdefault(key, []).append(number)
        self.fill()

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.inside)))
        self.world.leave(number)
        self.inside.remove(number)
        self.fill()

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.queued()))
        self.world.cancel(number)
        self.drop(number)

    @precondition(lambda self: self.lines)
    @rule(data=st.data(), cancel_first=st.booleans())
    def leave_and_cancel(self, data: st.DataObject, cancel_first: bool) -> None:
        """Leaving races with cancelling; the first waiter with the place has had its key's turn."""
        leaving = data.draw(st.sampled_from(sorted(self.inside)))
        cancelled = data.draw(st.sampled_from(self.queued()))
        self.world.leave_and_cancel(leaving, cancelled, cancel_first=cancel_first)
        self.inside.remove(leaving)
        if cancel_first:
            self.drop(cancelled)
        self.fill()
        if cancelled in self.inside:
            self.inside.remove(cancelled)
            self.entered.remove(cancelled)
        self.drop(cancelled)
        self.fill()

    @rule(seconds=st.sampled_from([1.0, 60.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.world.loop.advance(seconds)
        due_s = self.world.loop.now_s - self.wait_s
        for number in self.queued():
            if self.came_s[number] <= due_s:
                self.drop(number)
                self.refused.add(number)

    @invariant()
    def agrees(self) -> None:
        assert self.world.queue.running == len(self.inside) <= self.places
        assert self.world.queue.waiting == len(self.queued()) <= self.limit
        assert self.world.entered == self.entered
        assert set(self.world.refused) == self.refused


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=case_count(60), stateful_step_count=40, deadline=None)
