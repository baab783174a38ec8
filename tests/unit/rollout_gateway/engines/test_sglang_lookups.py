"""Looking up a prompt in SGLang's cache is counted and timed, and changes nothing of it."""

from __future__ import annotations

import time

import pytest

from paceline.services.rollout_gateway.engines.sglang.plugin.lookups import PrefixLookups


class Cache:
    """As far as the scheduler asks it."""

    def match_prefix(self, key: str, *, least: int = 0) -> str:
        began = time.perf_counter()
        while time.perf_counter() - began < 1e-3:
            pass
        if not key:
            raise ValueError("no key")
        return key[least:]


def test_lookups_are_counted_with_their_seconds() -> None:
    lookups, cache = PrefixLookups(), Cache()
    began = time.perf_counter()
    cache.match_prefix("abc")
    lookups.watch(cache)
    assert [cache.match_prefix("abc"), cache.match_prefix("abc", least=1)] == ["abc", "bc"]
    with pytest.raises(ValueError, match="no key"):
        cache.match_prefix("")
    assert lookups.count == 3
    assert 3e-3 <= lookups.seconds <= time.perf_counter() - began
