"""What a rank reads of the features stream, once, whoever read before it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from memory_stream import MemoryStream
from unit.drafter_trainer.samples import TARGET, batch

from drafter_trainer.link import CONSUMER, GROUP, TrainerLink
from paceline.streams import encode_features


class SilentParent:
    """Says nothing and is told nothing."""

    def poll(self) -> bytes | None:
        return None


@pytest.fixture
def stream() -> MemoryStream:
    return MemoryStream("features")


def link(stream: MemoryStream) -> TrainerLink:
    parent: Any = SilentParent()
    opened = TrainerLink(parent, stream, TARGET)
    opened.open_stream()
    return opened


def append(stream: MemoryStream, *seeds: int) -> None:
    async def all_of_them() -> None:
        for seed in seeds:
            await stream.append(*encode_features(batch(12, seed)))

    asyncio.run(all_of_them())


def sessions(one: TrainerLink) -> list[str]:
    return [sample.session for sample in one.read_samples(0.0)]


def test_what_a_killed_rank_had_read_but_not_decoded_comes_to_the_next(
    stream: MemoryStream,
) -> None:
    first = link(stream)
    append(stream, 1, 2)
    asyncio.run(stream.read(GROUP, CONSUMER, 1, 0.0))  # killed here
    append(stream, 3)
    assert sessions(link(stream)) == ["s1", "s2", "s3"]
    assert sessions(first) == []


def test_acknowledged_entries_are_gone_and_the_next_rank_goes_on_from_new_ones(
    stream: MemoryStream,
) -> None:
    append_later = link(stream)
    append(stream, 1, 2)
    assert sessions(append_later) == ["s1", "s2"]
    assert asyncio.run(stream.depth()).entries == 0
    restarted = link(stream)
    assert sessions(restarted) == []
    append(stream, 3)
    assert sessions(restarted) == ["s3"]
