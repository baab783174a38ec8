"""Finds ended and running requests with the same beginning as a prompt.

The module holds token ids and the order of eviction; the slot store copies the tensors. All entries
were computed under the serving policy, so every change of the policy must call `forget`.

A sequence is cut into blocks of BLOCK tokens. A block's key hashes its tokens and the previous key,
so one key identifies the whole beginning (vLLM's automatic prefix caching; Kwon et al. 2023, arXiv
2309.06180). A lookup follows a prompt's keys while some slot has them, then compares tokens. So a
hash collision costs a hit, but never gives a wrong token.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.services.rollout_gateway.engines.embedded.kv_cache import SlotStore
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.requests.timing import Stopwatch
from paceline.v1.engine_pb2 import PrefixStats

BLOCK = 16
MIN_PREFIX = BLOCK
"""Tokens; a shorter beginning is computed again."""
TokenArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Match:
    """A slot with the searched tokens as the first `length` tokens of its sequence."""

    slot: int
    length: int


def block_keys(tokens: TokenArray) -> list[int]:
    """One key for every full block of tokens [n]."""
    raw, size = tokens.tobytes(), BLOCK * tokens.itemsize
    keys: list[int] = []
    key = 0
    for start in range(0, len(raw) - size + 1, size):
        key = hash((key, raw[start : start + size]))
        keys.append(key)
    return keys


class PrefixIndex:
    """An index of sequences in slots by their beginning."""

    def __init__(self, slots: int, capacity: int) -> None:
        self._tokens = np.zeros((slots, capacity), dtype=np.int32)
        self._lengths = np.zeros(slots, dtype=np.int64)
        self._keys: dict[int, list[int]] = {}  # slot -> keys of its blocks
        self._slots: dict[int, set[int]] = {}  # key -> slots whose sequence has it

    def __contains__(self, slot: int) -> bool:
        return slot in self._keys

    def length(self, slot: int) -> int:
        """Number of tokens of the sequence in a slot; 0 for an empty slot."""
        return int(self._lengths[slot])

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences."""
        return int(self._lengths.sum())

    def add(self, slot: int, tokens: TokenArray, keys: list[int]) -> None:
        """Put tokens [n], n <= capacity, with their block keys in an empty slot."""
        self._tokens[slot, : len(tokens)] = tokens
        self._lengths[slot] = len(tokens)
        self._keys[slot] = keys
        for key in keys:
            self._slots.setdefault(key, set()).add(slot)

    def remove(self, slot: int) -> None:
        """Empty a slot, which may be empty already."""
        self._lengths[slot] = 0
        for key in self._keys.pop(slot, ()):
            holders = self._slots[key]
            holders.discard(slot)
            if not holders:
                del self._slots[key]

    def move(self, source: int, destination: int) -> None:
        """Move a sequence to another slot. An empty `source` leaves `destination` empty."""
        self.remove(destination)
        if source in self._keys:
            tokens, keys = self._tokens[source, : self._lengths[source]], self._keys[source]
            self.add(destination, tokens, keys)
            self.remove(source)

    def clear(self) -> None:
        """Empty all slots."""
        self._lengths[:] = 0
        self._keys.clear()
        self._slots.clear()

    def longest(self, tokens: TokenArray, keys: Sequence[int]) -> Match | None:
        """The longest common beginning with tokens [n], at least MIN_PREFIX; the lowest slot among
        equals.
        """
        holders: set[int] = set()
        blocks = 0
        for key in keys:
            found = self._slots.get(key)
            if found is None:
                break
            holders, blocks = found, blocks + 1

        if not holders:
            return None
        # All holders share these blocks, and no holder has the next key: they differ within one
        # block.
        slots = np.array(sorted(holders))
        start = blocks * BLOCK
        stop = min(start + BLOCK, len(tokens), self._tokens.shape[1])
        same = self._tokens[slots, start:stop] == tokens[start:stop]
        same &= np.arange(start, stop) < self._lengths[slots, None]
        shared = np.logical_and.accumulate(same, axis=1).sum(axis=1)
        best = int(shared.argmax())
        slot, length = int(slots[best]), start + int(shared[best])
        differs = np.flatnonzero(self._tokens[slot, :length] != tokens[:length])
        length = int(differs[0]) if len(differs) else length
        return Match(slot, length) if length >= MIN_PREFIX else None


class PrefixCache:
    """The cache of prefixes: slots 0 .. running - 1 hold running requests, and the next `retained`
    slots keep ended requests.

    No retained sequence is the beginning of another retained sequence. The least recently used
    sequences are evicted, so that `most` tokens stay at most. With retained = 0, lookups are off.
    Requests of fewer than `shortest` tokens are not kept. Caching so few tokens again costs about a
    round, and keeping every ended request costs more.
    """

    def __init__(
        self,
        running: int,
        retained: int,
        capacity: int,
        store: SlotStore,
        shortest: int = MIN_PREFIX,
        most: int = sys.maxsize,
    ) -> None:
        self._shortest, self._most = shortest, most
        self.enabled = retained > 0
        self.closed = False  # in quarantine: no reuse of other sequences
        self._store = store
        self._first_retained = running
        self._running = PrefixIndex(running, capacity)
        self._retained = PrefixIndex(retained, capacity)
        self._by_use = dict.fromkeys(range(retained))  # retained slots, least recently used first
        self._prompt_tokens = self._reused_tokens = self._lookups = 0
        self._stopwatch = Stopwatch()

    def close(self) -> None:
        """Disable all reuse between sequences and drop all entries."""
        self.enabled, self.closed = False, True
        self.forget()

    def offer(self, running: Sequence[RunningSequence]) -> None:
        """Offer the cached prompts of running requests for reuse, if cached under the serving
        policy.
        """
        for slot, sequence in enumerate(running):
            if sequence.lacking <= 0 and not sequence.stale and slot not in self._running:
                tokens = np.array(sequence.request.prompt[:-1], dtype=np.int32)
                self._running.add(slot, tokens, block_keys(tokens))

    def reuse(self, slot: int, sequence: RunningSequence) -> int:
        """Copies the longest cached beginning of a prompt and its earlier response to its slot;
        returns the number of copied tokens.

        The last token is always computed, because decoding begins with it.
        """
        self._stopwatch.start()
        source = self._find(np.array(sequence.request.known[:-1], dtype=np.int32))
        self._stopwatch.lap("lookup")
        self._lookups += 1
        if source is None:
            return 0
        self._store.copy(source.slot, slot, 0, source.length)
        self._stopwatch.lap("copy")
        sequence.cached = source.length
        sequence.copied += source.length
        return source.length

    def _find(self, tokens: TokenArray) -> Match | None:
        keys = block_keys(tokens)
        running = self._running.longest(tokens, keys)
        retained = self._retained.longest(tokens, keys)
        if retained is None or (running is not None and running.length > retained.length):
            return running
        self._use(retained.slot)
        return Match(self._first_retained + retained.slot, retained.length)

    def retain(self, slot: int, sequence: RunningSequence) -> None:
        """Keep the cached tokens of an ending request, unless they belong to an earlier policy."""
        self._prompt_tokens += len(sequence.request.prompt)
        self._reused_tokens += sequence.copied
        self.withdraw(slot)
        if not self.enabled or sequence.stale:
            return
        if not self._shortest <= sequence.cached <= self._most:
            return
        self._stopwatch.start()
        whole = (*sequence.request.prompt, *sequence.tokens)
        tokens = np.array(whole[: sequence.cached], dtype=np.int32)
        keys = block_keys(tokens)
        place = self._place(tokens, keys)
        if place is not None:
            self._store.copy(slot, self._first_retained + place, 0, len(tokens))
            self._retained.add(place, tokens, keys)
            self._use(place)

        self._stopwatch.lap("copy")

    def _place(self, tokens: TokenArray, keys: Sequence[int]) -> int | None:
        """An empty slot for a sequence; None if the whole sequence is retained already."""
        match = self._retained.longest(tokens, keys)
        if match is not None and match.length == len(tokens):
            self._use(match.slot)
            return None
        grows = match is not None and match.length == self._retained.length(match.slot)
        if match is not None and grows:
            place = match.slot
            self._retained.remove(place)
        else:
            self._evict(place := next(iter(self._by_use)))
        for other in self._by_use:
            if self._retained.tokens + len(tokens) <= self._most:
                break
            self._evict(other)
        return place

    def _evict(self, retained: int) -> None:
        if length := self._retained.length(retained):
            self._retained.remove(retained)
            self._store.clear(self._first_retained + retained, length)

    def _use(self, retained: int) -> None:
        del self._by_use[retained]
        self._by_use[retained] = None

    def withdraw(self, slot: int) -> None:
        """End the reuse of a running request's cached tokens."""
        self._running.remove(slot)

    def move(self, source: int, destination: int) -> None:
        """Move a running request to another slot."""
        self._running.move(source, destination)

    def forget(self) -> None:
        """Drop all entries; running requests may be offered again."""
        self._running.clear()
        for retained in self._by_use:
            self._evict(retained)

    @property
    def stats(self) -> PrefixStats:
        """Counters since start."""
        seconds = self._stopwatch.totals
        return PrefixStats(
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused_tokens,
            lookups=self._lookups,
            lookup_s=seconds["lookup"],
            copy_s=seconds["copy"],
        )
