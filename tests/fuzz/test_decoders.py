"""Whatever bytes come, a decoder gives a value or refuses them in its own words, at once."""

from __future__ import annotations

from contextlib import suppress

import pytest
from fuzz.decoders import DECODERS
from fuzz.noise import fuzz

pytestmark = pytest.mark.fuzz


@pytest.mark.parametrize("name", DECODERS)
def test_noise_is_a_value_or_an_error_of_ours(name: str) -> None:
    decoder = DECODERS[name]
    for raw in decoder.valid:
        decoder.read(raw)  # valid bytes are read: the noise has something to spoil

    def read(raw: bytes) -> None:
        with suppress(*decoder.refuses):
            decoder.read(raw)

    # Parsers that go down level by level end here unless somebody thought of it.
    for deep in (b"[", b'{"a":', b'{"a":[', b'{"speculation":'):
        read(deep * 100_000)
    fuzz(decoder.valid, read)
