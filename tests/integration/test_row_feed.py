"""A rank's thread reads each entry of the features stream once, also entries that a killed rank had
read but not decoded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from redis.asyncio import Redis
from unit.drafter_trainer.samples import TARGET, batch
from watched_stream import WatchedStream

from paceline.local.patience import patient
from paceline.services.drafter_trainer.rows.sample import FeatureSample
from paceline.services.drafter_trainer.rows.store import CONSUMER, GROUP, RowFeed
from paceline.streams import connect, encode_features, run_key


class Taken:
    """Session ids in the order of arrival."""

    def __init__(self) -> None:
        self.sessions: list[str] = []
        self._changed = threading.Condition()

    def take(self, samples: list[FeatureSample]) -> None:
        with self._changed:
            self.sessions += [one.session for one in samples]
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.sessions) >= count, patient(10))
        return self.sessions


@contextmanager
def feeding(url: str, run_id: str, taken: Taken) -> Iterator[RowFeed]:
    feed = RowFeed(
        lambda: WatchedStream(connect(url), run_key(run_id, "features")), TARGET, taken.take
    )
    feed.start()
    try:
        yield feed
    finally:
        feed.close()
    feed.check()


@pytest.fixture
def stream(redis_client: Redis, run_id: str) -> WatchedStream:
    return WatchedStream(redis_client, run_key(run_id, "features"))


async def append(stream: WatchedStream, *seeds: int) -> None:
    for seed in seeds:
        await stream.append(*encode_features(batch(12, seed)))


async def test_rows_come_as_they_are_appended_and_leave_the_stream(
    stream: WatchedStream, redis_url: str, run_id: str
) -> None:
    taken = Taken()
    with feeding(redis_url, run_id, taken):
        await append(stream, 1, 2)
        assert taken.wait_for(2) == ["s1", "s2"]
        await append(stream, 3)
        assert taken.wait_for(3) == ["s1", "s2", "s3"]
    assert (await stream.depth()).entries == 0


async def test_what_a_killed_rank_had_read_but_not_decoded_comes_to_the_next(
    stream: WatchedStream, redis_url: str, run_id: str
) -> None:
    await stream.create_group(GROUP)
    await append(stream, 1, 2)
    await stream.read(GROUP, CONSUMER, 1, 0.0)  # killed here
    await append(stream, 3)
    taken = Taken()
    with feeding(redis_url, run_id, taken):
        assert taken.wait_for(3) == ["s1", "s2", "s3"]


async def test_an_entry_that_cannot_be_used_is_put_aside_and_counted(
    stream: WatchedStream, redis_url: str, run_id: str
) -> None:
    taken = Taken()
    with feeding(redis_url, run_id, taken) as feed:
        fields, _ = encode_features(batch(12, 1))
        await stream.append(fields, b"nonsense")
        await append(stream, 2)
        assert taken.wait_for(1) == ["s2"]
    assert feed.dropped == {"unusable": 1}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_thread_that_has_died_is_an_error_of_the_rank(
    stream: WatchedStream, redis_url: str, run_id: str
) -> None:
    def broken(samples: list[FeatureSample]) -> None:
        raise RuntimeError("no room")

    feed = RowFeed(
        lambda: WatchedStream(connect(redis_url), run_key(run_id, "features")), TARGET, broken
    )
    feed.start()
    await append(stream, 1)
    feed.join(patient(10))
    with pytest.raises(RuntimeError, match="no room"):
        feed.check()
