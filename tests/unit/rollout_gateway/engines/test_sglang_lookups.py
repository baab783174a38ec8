"""Looking up a prompt in SGLang's cache is counted and timed, and changes nothing of it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from paceline.services.rollout_gateway.engines.sglang.plugin.process import PrefixLookups


class Cache:
    """As far as the scheduler asks it."""

    def match_prefix(self, key: str, *, least: int = 0) -> str:
        began = time.perf_counter()
        while time.perf_counter() - began < 1e-3:
            pass
        if not key:
            raise ValueError("no key")
        return key[least:]

    def cache_unfinished_req(self, key: str) -> str:
        if key == "full":
            raise MemoryError(key)
        return self.match_prefix(key)


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


def test_what_the_cache_looks_up_for_itself_is_not_counted() -> None:
    lookups, cache = PrefixLookups(), Cache()
    lookups.watch(cache)
    assert cache.cache_unfinished_req("abc") == "abc"
    with pytest.raises(MemoryError):
        cache.cache_unfinished_req("full")
    assert lookups.count == 0
    cache.match_prefix("abc")
    assert lookups.count == 1


def test_a_cache_that_looks_up_nothing_for_itself_is_timed_all_the_same() -> None:
    """As from SGLang 0.5.23 on."""
    found: list[str] = []
    cache = SimpleNamespace(match_prefix=found.append)
    lookups = PrefixLookups()
    lookups.watch(cache)
    cache.match_prefix("abc")
    assert (found, lookups.count) == (["abc"], 1)
