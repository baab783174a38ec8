"""Large requests are processed in turn beside the loop; the number of waiters is bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from paceline.errors import InvalidInput, ResourceExhausted
from paceline.local.patience import patient
from paceline.services.rollout_gateway import background
from paceline.services.rollout_gateway.background import LARGE_BYTES, SMALL_BYTES, LargeRequests

LOOP = "MainThread"
MEDIUM, LARGE = SMALL_BYTES + 1, LARGE_BYTES + 1


@pytest.fixture
def aside(monkeypatch: pytest.MonkeyPatch) -> Iterator[LargeRequests]:
    monkeypatch.setattr(background, "MAX_HELD_BYTES", 3 * LARGE)
    monkeypatch.setattr(background, "WAIT_S", 0.2)
    made = LargeRequests()
    yield made
    made.stop()


def where() -> str:
    return threading.current_thread().name


async def test_small_work_is_done_where_it_stands_and_the_rest_in_threads(
    aside: LargeRequests,
) -> None:
    assert await aside.run(SMALL_BYTES, where) == where()
    medium, large = await aside.run(MEDIUM, where), await aside.run(LARGE, where)
    assert len({where(), medium, large}) == 3


async def test_what_the_work_raises_comes_back_and_leaves_room(aside: LargeRequests) -> None:
    def refuse() -> None:
        raise InvalidInput("no")

    for _ in range(10):
        with pytest.raises(InvalidInput, match="no"):
            await aside.run(LARGE, refuse)


async def test_medium_work_does_not_wait_for_large_work(aside: LargeRequests) -> None:
    over = threading.Event()
    large = asyncio.create_task(aside.run(LARGE, lambda: over.wait(patient(10))))
    await asyncio.sleep(0)
    await aside.run(MEDIUM, over.set)
    assert await large


async def test_more_bytes_than_there_is_room_for_are_refused_at_once(aside: LargeRequests) -> None:
    over = threading.Event()
    work = [asyncio.create_task(aside.run(LARGE, over.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="too many bytes") as caught:
        await aside.run(LARGE, where)
    assert caught.value.reason == "LARGE_REQUESTS"
    over.set()
    await asyncio.gather(*work, return_exceptions=True)
    assert await aside.run(LARGE, where)


async def test_what_waits_too_long_is_refused_and_never_done(aside: LargeRequests) -> None:
    over, done = threading.Event(), threading.Event()
    first = asyncio.create_task(aside.run(LARGE, over.wait))
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="waited too long"):
        await aside.run(LARGE, done.set)
    over.set()
    await asyncio.gather(first, return_exceptions=True)
    await aside.run(LARGE, where)
    assert not done.is_set()
