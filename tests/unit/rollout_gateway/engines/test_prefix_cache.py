"""The prefix cache against a list of sequences compared token by token."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from drawn_cases import case_count
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from paceline.services.rollout_gateway.engines.embedded import prefix_cache
from paceline.services.rollout_gateway.engines.embedded.prefix_cache import (
    MIN_PREFIX,
    Match,
    PrefixCache,
    PrefixIndex,
    block_keys,
)
from paceline.services.rollout_gateway.engines.nouns import Request
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.sampling import Sampling

RUNNING, RETAINED, CAPACITY = 3, 3, 128
Tokens = tuple[int, ...]


@dataclass
class Store:
    """Slots that hold the tokens themselves."""

    slots: dict[int, list[int]] = field(
        default_factory=lambda: {n: [] for n in range(RUNNING + RETAINED)}
    )
    copies: list[tuple[int, int]] = field(default_factory=list)

    def copy(self, source: int, destination: int, start: int, stop: int) -> None:
        assert stop <= len(self.slots[source]), "nothing is cached there"
        self.slots[destination][start:stop] = self.slots[source][start:stop]
        self.copies.append((source, destination))

    def clear(self, slot: int, length: int) -> None:
        assert length <= len(self.slots[slot]), "nothing is cached there"
        self.slots[slot] = []


def sequence(tokens: Tokens, said: int = 0, *, stale: bool = False) -> RunningSequence:
    """A request with all tokens cached except the last; the last `said` tokens are its response."""
    made = RunningSequence(
        Request(0, tokens[: len(tokens) - said], Sampling(1, 8)), frozenset(), 8, stale=stale
    )
    made.tokens = list(tokens[len(tokens) - said :])
    made.length, made.cached = len(tokens), len(tokens) - 1
    return made


def waiting(tokens: Tokens) -> RunningSequence:
    return RunningSequence(Request(0, tokens, Sampling(1, 8)), frozenset(), 8, length=len(tokens))


def common(one: Tokens, other: Tokens) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


class Oracle:
    """The same rules over plain tuples."""

    def __init__(self) -> None:
        self.running: dict[int, Tokens] = {}
        self.retained: dict[int, Tokens] = dict.fromkeys(
            range(RETAINED), ()
        )  # least recently used first

    def use(self, slot: int, tokens: Tokens) -> None:
        del self.retained[slot]
        self.retained[slot] = tokens

    def best(self, held: dict[int, Tokens], asked: Tokens) -> tuple[int, int]:
        """(length, slot), the lowest slot among equals; length 0 when too short."""
        length, slot = max(
            ((common(tokens, asked), -slot) for slot, tokens in held.items()), default=(0, 0)
        )
        return (length, -slot) if length >= MIN_PREFIX else (0, 0)

    def ask(self, asked: Tokens) -> int:
        retained, slot = self.best(self.retained, asked)
        running, _ = self.best(self.running, asked)
        if retained and retained >= running:
            self.use(slot, self.retained[slot])
        return max(retained, running)

    def end(self, slot: int, tokens: Tokens, stale: bool) -> None:
        self.running.pop(slot, None)
        if stale or len(tokens) < MIN_PREFIX:
            return
        length, place = self.best(self.retained, tokens)
        if length == len(tokens):
            self.use(place, self.retained[place])
        elif length and length == len(self.retained[place]):
            self.use(place, tokens)
        else:
            self.use(next(iter(self.retained)), tokens)


_STEMS = [tuple(random.Random(seed).choices(range(50), k=80)) for seed in range(2)]
# Few enough that one is often the beginning of another, or ties with it.
_SEQUENCES = st.sampled_from(
    [
        (*stem[:cut], *tail)
        for stem in _STEMS
        for cut in (0, 15, 17, 48)
        for tail in ((1,), (0, 1), (0, 0, 0))
    ]
)
_SLOTS = st.integers(0, RUNNING - 1)
_STEPS = st.one_of(
    st.tuples(st.just("ask"), _SEQUENCES),
    st.tuples(st.just("run"), _SLOTS, _SEQUENCES),
    st.tuples(st.just("end"), _SLOTS, _SEQUENCES, st.sampled_from((False, False, False, True))),
    st.tuples(st.just("move"), _SLOTS, _SLOTS),
    st.tuples(st.just("withdraw"), _SLOTS),
    st.tuples(st.just("policy"), st.integers(0, 9)),  # rarely, so that slots fill
)


def offer(cache: PrefixCache, oracle: Oracle, store: Store, slot: int, tokens: Tokens) -> None:
    """A request runs in a slot, and no other does."""
    if slot not in oracle.running:
        oracle.running[slot] = tokens[:-1]
        store.slots[slot] = list(tokens[:-1])
    cache.offer([sequence(tokens) if n == slot else waiting((0, 0)) for n in range(RUNNING)])


@hypothesis_settings(max_examples=case_count(300))
@given(st.lists(_STEPS, min_size=20, max_size=60))
def test_what_is_found_is_what_comparing_every_sequence_finds(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    store, oracle = Store(), Oracle()
    cache = PrefixCache(RUNNING, RETAINED, CAPACITY, store)
    for step in steps:
        match step:
            case ("ask", tokens):
                asked = waiting(tokens)
                free = next((slot for slot in range(RUNNING) if slot not in oracle.running), None)
                if free is None:
                    continue
                store.slots[free] = []
                expected = oracle.ask(tokens[:-1])
                assert cache.reuse(free, asked) == asked.cached == asked.copied == expected
                assert store.slots[free] == list(tokens[:expected])
            case ("run", slot, tokens):
                offer(cache, oracle, store, slot, tokens)
            case ("end", slot, tokens, stale):
                store.slots[slot] = list(tokens[:-1])
                cache.retain(slot, sequence(tokens, said=len(tokens) // 2, stale=stale))
                oracle.end(slot, tokens[:-1], stale)
            case ("move", source, destination) if source != destination:
                cache.move(source, destination)
                store.slots[destination] = list(store.slots[source])
                oracle.running.pop(destination, None)
                if source in oracle.running:
                    oracle.running[destination] = oracle.running.pop(source)
            case ("withdraw", slot):
                cache.withdraw(slot)
                oracle.running.pop(slot, None)
            case ("policy", 0):
                cache.forget()
                oracle.running.clear()
                oracle.retained = dict.fromkeys(oracle.retained, ())
    for slot, tokens in oracle.retained.items():
        assert tuple(store.slots[RUNNING + slot][: len(tokens)]) == tokens


def numbers(count: int, seed: int = 0) -> Tokens:
    return tuple(random.Random(seed).choices(range(1000), k=count))


def test_a_collision_of_hashes_costs_a_hit_and_never_gives_foreign_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_cache, "hash", lambda _: 7, raising=False)
    index = PrefixIndex(2, CAPACITY)
    held, other = (
        np.array(numbers(60), dtype=np.int32),
        np.array(numbers(60, seed=1), dtype=np.int32),
    )
    index.add(0, held, block_keys(held))
    assert index.longest(other, block_keys(other)) is None
    half = np.concatenate([held[:20], other[20:]])
    assert index.longest(half, block_keys(half)) == Match(0, 20)


def test_a_longer_sequence_of_the_same_conversation_takes_the_place_of_the_shorter() -> None:
    store = Store()
    cache = PrefixCache(RUNNING, RETAINED, CAPACITY, store)
    conversation = numbers(100)
    for length in (30, 47, 90, 60):  # the cache already holds the last
        store.slots[0] = list(conversation[: length - 1])
        cache.retain(0, sequence(conversation[:length]))
    assert store.copies == [(0, RUNNING)] * 3
    assert cache.reuse(1, waiting(conversation)) == 89


def test_the_least_recently_used_sequence_makes_room_and_memory_is_bounded() -> None:
    store = Store()
    cache = PrefixCache(RUNNING, RETAINED, CAPACITY, store)
    for seed in range(RETAINED):
        store.slots[0] = list(numbers(40, seed))
        cache.retain(0, sequence(numbers(41, seed)))
    assert cache.reuse(1, waiting(numbers(41, 0))) == 40
    for seed in range(10, 10 + RETAINED - 1):
        store.slots[0] = list(numbers(40, seed))
        cache.retain(0, sequence(numbers(41, seed)))
    assert {seed: cache.reuse(1, waiting(numbers(41, seed))) for seed in (0, 1, 2)} == {
        0: 40,
        1: 0,
        2: 0,
    }
    assert {destination for _, destination in store.copies} <= set(range(RUNNING + RETAINED))


def test_retained_sequences_leave_in_the_order_of_use_until_a_new_one_fits() -> None:
    store = Store()
    cache = PrefixCache(RUNNING, RETAINED, CAPACITY, store, most=100)
    for seed, length in ((0, 40), (1, 50), (2, 60), (3, 101)):  # the last one never fits
        store.slots[0] = list(numbers(length, seed))
        cache.retain(0, sequence(numbers(length + 1, seed)))
        assert sum(len(store.slots[RUNNING + place]) for place in range(RETAINED)) <= 100
    found = [cache.reuse(1, waiting(numbers(61, seed))) for seed in range(4)]
    assert found == [0, 0, 60, 0]


def test_a_retained_sequence_that_serves_as_well_as_a_running_one_counts_as_used() -> None:
    store = Store()
    cache = PrefixCache(RUNNING, 2, CAPACITY, store)
    for seed in (0, 1):
        store.slots[1] = list(numbers(40, seed))
        cache.retain(1, sequence(numbers(41, seed)))
    store.slots[0] = list(numbers(40))
    cache.offer([sequence(numbers(41))])
    assert cache.reuse(1, waiting(numbers(41))) == 40  # 0 both runs and is retained
    store.slots[1] = list(numbers(40, 2))
    cache.retain(1, sequence(numbers(41, 2)))
    cache.withdraw(0)
    assert [cache.reuse(1, waiting(numbers(41, seed))) for seed in (0, 1)] == [40, 0]


def test_a_copy_that_fails_leaves_nothing_to_be_found() -> None:
    class Broken(Store):
        def copy(self, source: int, destination: int, start: int, stop: int) -> None:
            raise RuntimeError("out of memory")

    cache = PrefixCache(RUNNING, RETAINED, CAPACITY, Broken())
    with pytest.raises(RuntimeError):
        cache.retain(0, sequence(numbers(40)))
    assert cache.reuse(1, waiting(numbers(40))) == 0


def test_without_slots_nothing_is_kept() -> None:
    cache = PrefixCache(RUNNING, 0, CAPACITY, Store())
    cache.retain(0, sequence(numbers(40)))
    assert not cache.enabled
    assert cache.reuse(1, waiting(numbers(40))) == 0


def test_counters_tell_prompts_that_ended_and_lookups() -> None:
    store = Store()
    cache = PrefixCache(RUNNING, RETAINED, CAPACITY, store)
    store.slots[0] = list(numbers(39))
    cache.retain(0, sequence(numbers(40)))
    second = waiting(numbers(50))
    assert cache.reuse(0, second) == 39
    cache.retain(0, second)
    stats = cache.stats
    assert (stats.prompt_tokens, stats.reused_tokens, stats.lookups) == (90, 39, 1)
    assert stats.lookup_s > 0
    assert stats.copy_s > 0
