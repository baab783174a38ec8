"""A circuit that opens, and requests of before that end while it is open or after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from paceline.errors import Unavailable
from paceline.services.rollout_gateway.rewards.remote import CircuitBreaker

OPEN_S = 0.3


class Asking:
    """One request that ends when told."""

    def __init__(self, breaker: CircuitBreaker) -> None:
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._begun = asyncio.Event()
        self._task = asyncio.ensure_future(self._ask(breaker))

    async def _ask(self, breaker: CircuitBreaker) -> None:
        async with breaker.request(until=asyncio.get_running_loop().time()):
            self._begun.set()
            await self._end

    @classmethod
    async def begun(cls, breaker: CircuitBreaker) -> Asking:
        one = cls(breaker)
        await one._begun.wait()
        return one

    async def fails(self) -> None:
        self._end.set_exception(OSError("down"))
        with pytest.raises(OSError, match="down"):
            await self._task


async def test_failures_of_requests_of_before_do_not_keep_the_circuit_open() -> None:
    breaker = CircuitBreaker(failures=1, open_s=OPEN_S)
    first, late = await Asking.begun(breaker), await Asking.begun(breaker)
    await first.fails()
    closes_by = asyncio.get_running_loop().time() + OPEN_S
    assert breaker.open
    await asyncio.sleep(OPEN_S / 10)  # time that a later opening would add
    await late.fails()
    # Refused at once if the circuit stayed open any longer than from the first failure.
    async with breaker.request(until=closes_by):
        pass
    assert not breaker.open


async def test_failures_of_requests_of_before_do_not_open_the_circuit_again() -> None:
    breaker = CircuitBreaker(failures=2, open_s=0.01)
    asking = [await Asking.begun(breaker) for _ in range(4)]
    for one in asking[:2]:
        await one.fails()
    assert breaker.open
    async with breaker.request(until=asyncio.get_running_loop().time() + OPEN_S):
        pass
    for one in asking[2:]:
        await one.fails()
    assert not breaker.open


async def test_a_circuit_that_opened_refuses_who_cannot_wait_and_a_failed_probe_opens_it_again(
    skip: Callable[[float], None],
) -> None:
    open_s = 600.0
    breaker = CircuitBreaker(failures=1, open_s=open_s)
    await (await Asking.begun(breaker)).fails()
    clock = asyncio.get_running_loop().time
    with pytest.raises(Unavailable, match="1 failures in a row"):
        async with breaker.request(until=clock() + open_s / 2):
            pass
    skip(open_s)
    with pytest.raises(OSError, match="still down"):
        async with breaker.request(until=clock() + 2 * open_s):
            raise OSError("still down")
    with pytest.raises(Unavailable, match="2 failures in a row"):
        async with breaker.request(until=clock() + open_s / 2):
            pass
