"""A decoder returns a value for any bytes or raises its declared errors, without delay."""

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
        decoder.read(raw)  # valid bytes are readable, so that the noise has a target

    def read(raw: bytes) -> None:
        with suppress(*decoder.refuses):
            decoder.read(raw)

    # Deep nesting ends a recursive parser without a depth limit.
    for deep in (b"[", b'{"a":', b'{"a":[', b'{"speculation":'):
        read(deep * 100_000)
    fuzz(decoder.valid, read)
