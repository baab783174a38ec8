"""The per-slot memory of the engine, allocated once, and the prefix cache over it.

Peak: (max_batch + prefix_slots) * capacity * (layers * kv_width * item + 8 + W * item) bytes. The
last term exists only if a speculator or the capture reads hidden states. W = (inner + 1) * H. The
scheduler assigns the slots of running requests, the prefix cache the remaining slots.

The module holds token ids and the order of eviction; the slot store copies the tensors. All entries
were computed under the serving policy, so every change of the policy must call `forget`.

A sequence is cut into blocks of BLOCK tokens. A block's key hashes its tokens and the previous key,
so one key identifies the whole beginning (vLLM's automatic prefix caching; Kwon et al. 2023, arXiv
2309.06180). A lookup follows a prompt's keys while some slot has them, then compares tokens. So a
hash collision costs a hit, but never gives a wrong token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.models import cache, decoder
from paceline.services.rollout_gateway.engines.requests.sequence import RunningSequence
from paceline.services.rollout_gateway.engines.requests.timing import Stopwatch
from paceline.services.rollout_gateway.engines.worker.ring import RowRing
from paceline.v1.engine_pb2 import PrefixStats

WAITING = 64
"""Minimum number of a request's rows written together, because a call costs as much for a few rows.
With a full batch, one write at most fills the sink's ring.
"""


class SlotStore:
    """S slots of C positions; it also writes the hidden rows of cached tokens to the sink."""

    def __init__(
        self,
        weights: decoder.DecoderWeights,
        slots: int,
        capacity: int,
        *,
        keep_hidden: bool,
        inner: tuple[int, ...] = (),
        sink: RowRing | None = None,
        row_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """inner: layers with their input before the last state in a row. sink: receives hidden rows
        in row_dtype.
        """
        self.sink, self._row_dtype = sink, row_dtype
        self.rows_dropped = 0
        """Rows that a full sink has dropped."""
        config, dtype, device = weights.config, weights.head.dtype, weights.head.device
        self.kv = cache.StaticCache(
            config,
            layers=config.num_layers,
            slots=slots,
            capacity=capacity,
            dtype=dtype,
            device=device,
        )
        self.token_ids = torch.zeros(slots, capacity, dtype=torch.int64, device=device)
        """int64 [S, C]: the tokens of every slot, undefined after the sequence's end."""
        self.inner = inner
        width = (len(inner) + 1) * config.hidden_size if keep_hidden else 0
        self.hidden = torch.zeros(slots, capacity, width, dtype=dtype, device=device)
        """[S, C, W]: true hidden states of cached tokens; width 0 if nothing reads them."""

    def release(self) -> int:
        """Free keys, values and hidden states until `allocate`; returns bytes."""
        parts = (self.kv.data, self.hidden)
        for part in parts:
            part.untyped_storage().resize_(0)
        return sum(part.nbytes for part in parts)

    def allocate(self) -> None:
        """Allocate the freed memory again, with zeros: masked cells are multiplied too."""
        for part in (self.kv.data, self.hidden):
            part.untyped_storage().resize_(part.nbytes)
            part.zero_()

    def start(self, slot: int, known: tuple[int, ...]) -> None:
        """Store the tokens of a new request."""
        self.token_ids[slot, : len(known)] = torch.tensor(known)

    def cells(self, slots: Tensor, roots: Tensor, count: int) -> Tensor:
        """Flat indices int64 [B * count] of the token cells at positions roots .. roots + count - 1
        of slots [B].
        """
        steps = torch.arange(count, device=roots.device)
        return ((slots * self.kv.capacity + roots)[:, None] + steps).view(-1)

    def keep_hidden(self, cells: Tensor, hidden: Tensor) -> None:
        """Store hidden states [N, W] at token cells [N], for capture and for drafters that catch up
        later.
        """
        if self.hidden.shape[-1]:
            self.hidden.view(-1, self.hidden.shape[-1]).index_copy_(0, cells, hidden)

    def keep_path(self, slots: Tensor, roots: Tensor, path: Tensor) -> None:
        """Move the cache entries of a path [B, P] of tree nodes to consecutive positions from roots
        [B], root first.
        """
        if path.shape[1] > 1:
            steps = torch.arange(path.shape[1], device=path.device)
            self.kv.reorder(slots, roots[:, None] + path, roots[:, None] + steps)

    def write_rows(
        self,
        slots: Sequence[int],
        sequences: Sequence[RunningSequence],
        version: int,
        least: int = WAITING,
    ) -> None:
        """Write the waiting rows of each captured sequence that has `least` or more. Waiting rows
        belong to cached tokens not yet written.
        """
        if self.sink is None:
            return
        due = [
            (slot, one)
            for slot, one in zip(slots, sequences, strict=True)
            if one.request.capture and one.cached - one.captured >= least
        ]
        if not due:
            return
        ids = np.array([one.request.request_id for _, one in due], dtype=np.uint64)
        positions = [np.arange(one.captured, one.cached, dtype=np.uint32) for _, one in due]
        stretches = [(slot, slice(one.captured, one.cached)) for slot, one in due]
        tokens = torch.cat([self.token_ids[cells] for cells in stretches]).cpu().numpy()
        states = torch.cat([self.hidden[cells] for cells in stretches])
        written = self.sink.write(
            np.repeat(ids, list(map(len, positions))),
            np.concatenate(positions),
            tokens.astype(np.uint32),
            version,
            states.to(self._row_dtype).cpu().view(torch.uint8).numpy(),
        )
        self.rows_dropped += len(tokens) - written
        for _, one in due:
            one.captured = one.cached

    def move(self, source: int, destination: int, length: int) -> None:
        """Move a sequence of `length` tokens to another slot."""
        self.kv.copy(source, destination, 0, length)
        self.token_ids[destination, :length] = self.token_ids[source, :length]
        if self.hidden.shape[-1]:
            self.hidden[destination, :length] = self.hidden[source, :length]

    def copy(self, source: int, destination: int, start: int, stop: int) -> None:
        """Copy the cache of tokens start .. stop - 1 to another slot."""
        self.kv.copy(source, destination, start, stop)
        if self.hidden.shape[-1]:
            self.hidden[destination, start:stop] = self.hidden[source, start:stop]


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
    sequence is evicted. With retained = 0, lookups are off. Requests of fewer than `shortest`
    tokens are not kept. Caching so few tokens again costs about a round, and keeping every ended
    request costs more.
    """

    def __init__(
        self,
        running: int,
        retained: int,
        capacity: int,
        store: SlotStore,
        shortest: int = MIN_PREFIX,
    ) -> None:
        self._shortest = shortest
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
        if not self.enabled or sequence.stale or sequence.cached < self._shortest:
            return
        self._stopwatch.start()
        tokens = np.array(
            (*sequence.request.prompt, *sequence.tokens)[: sequence.cached], dtype=np.int32
        )
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
        place = match.slot if match is not None and grows else next(iter(self._by_use))
        self._retained.remove(place)
        return place

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
        self._retained.clear()

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
