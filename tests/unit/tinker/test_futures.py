"""Futures keep answers in bounded memory until they are read."""

from __future__ import annotations

import json

import pytest

from paceline.errors import FailedPrecondition, InvalidInput, NotFound, ResourceExhausted
from paceline.services.tinker.futures import LOST, Futures, Result


async def answer() -> Result:
    return Result(b"1234")


async def test_read_answers_give_way_to_new_calls_and_unread_ones_stay() -> None:
    futures = Futures(most=2, most_bytes=100)
    for name in ("a", "b"):
        await futures.run(futures.open(name, 10), answer())
    with pytest.raises(ResourceExhausted):
        futures.open("c", 10)
    assert (await futures.wait("a", 1.0)) == Result(b"1234")
    futures.open("c", 10)
    assert futures.find("a") is None
    assert futures.find("b") is not None
    with pytest.raises(NotFound):
        await futures.wait("a", 1.0)


async def test_bytes_of_calls_and_answers_count() -> None:
    futures = Futures(most=10, most_bytes=100)
    first = futures.open("a", 90)
    with pytest.raises(ResourceExhausted):
        futures.open("b", 20)
    await futures.run(first, answer())
    futures.open("b", 90)
    with pytest.raises(ResourceExhausted):
        futures.open("c", 10)


async def test_an_answer_that_is_not_there_in_time_is_none() -> None:
    futures = Futures(most=10, most_bytes=100)
    futures.open("a", 1)
    assert await futures.wait("a", 0.0) is None


async def test_failures_have_the_category_of_their_cause() -> None:
    async def fails(error: Exception) -> Result:
        raise error

    futures = Futures(most=10, most_bytes=10_000)
    cases = {
        InvalidInput("x"): "user",
        FailedPrecondition("x"): "user",
        FailedPrecondition("x", reason=LOST): "server",
        ResourceExhausted("x"): "server",
        ValueError("x"): "server",
    }
    for number, (error, category) in enumerate(cases.items()):
        name = str(number)
        await futures.run(futures.open(name, 1), fails(error))
        result = await futures.wait(name, 1.0)
        assert result is not None
        assert json.loads(result.body)["category"] == category
