"""Reads captured rows from their stream in one thread, with or without a lease, and holds them for
another thread, which trains on them.
"""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline import telemetry
from paceline.errors import DataLoss, ResourceExhausted, Unavailable
from paceline.models.config import ModelConfig
from paceline.models.products import spare_rows
from paceline.services.drafter_trainer.config import BufferConfig
from paceline.services.drafter_trainer.metrics import SAMPLES_DROPPED
from paceline.services.drafter_trainer.rows.buffer import FeatureBuffer
from paceline.services.drafter_trainer.rows.sample import (
    FeatureSample,
    PolicyHead,
    pack,
    sample_from,
)
from paceline.speculators.packed import PackedRow
from paceline.speculators.vocabulary import DEFAULT_SIZE
from paceline.streams import Entry, RedisStream, decode_features
from paceline.telemetry import names, span

KEPT_HEADS = 4
_ALWAYS = 1 << 40
READY = 4
"""Batches packed before a lease begins."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch: a row for each rank, all with one policy head."""

    rows: list[PackedRow]
    head: PolicyHead
    samples: int
    traceparents: frozenset[str]  # of the source entries


class RowStore:
    """The buffer behind a lock, with the first batches of a lease, which are packed while no lease
    trains.
    """

    def __init__(
        self, config: BufferConfig, seed: int, batch_bytes: int, kept: Sequence[int] = ()
    ) -> None:
        """`batch_bytes`: most bytes of captured states in a row. `kept`: tokens that a draft
        vocabulary must have.
        """
        self._kept, self._counts = list(kept), torch.zeros(0, dtype=torch.int64)
        self._config, self._batch_bytes = config, batch_bytes
        self.heads: dict[str, PolicyHead] = {}  # by hash, newest last; the newest KEPT_HEADS
        self._buffer = FeatureBuffer(config, seed)
        self._changed = threading.Condition(threading.RLock())
        self._ready: deque[PackedBatch] = deque()
        self._resting = True
        self._position_bytes = 1  # bytes of one position's states in training
        self.shape: Callable[[], tuple[int, int]] = lambda: (1, 32)
        """Number of ranks that train next, and tokens of one rank's row."""

    # --- the thread that reads --------------------------------------------------------------------

    def add(self, samples: Sequence[FeatureSample]) -> None:
        """Adds arrived samples. Without a training lease, packs the first batches of the
        next one.
        """
        with self._changed:
            for sample in samples:
                if vocabulary := len(self._counts):
                    self._counts += torch.bincount(sample.drawn, minlength=vocabulary)
                self._buffer.add(sample)
                # states, and logits of the draftable tokens with their gradients
                numbers = sample.hidden.shape[1] + sample.hidden_size
                self._position_bytes = 4 * (numbers + 2 * min(vocabulary, DEFAULT_SIZE))
            self._forget_stale()
            if self._resting:
                self._prepare()
            self._changed.notify_all()

    # --- the thread that trains -------------------------------------------------------------------

    @property
    def counts(self) -> Tensor:
        """int64 [V]: how often each token was a drafting target so far; of tokens to keep, more."""
        with self._changed:
            counts = self._counts.clone()
        counts[self._kept] = _ALWAYS
        return counts

    def add_head(self, head: PolicyHead) -> None:
        """Adds a head as the newest. Rows of dropped heads and earlier packed batches are
        removed.
        """
        with self._changed:
            self.heads.pop(head.hash, None)
            self.heads[head.hash] = head
            if not len(self._counts):
                self._counts = torch.zeros(len(head.lm_head), dtype=torch.int64)
            while len(self.heads) > KEPT_HEADS:
                del self.heads[next(iter(self.heads))]
            self._ready.clear()
            self._forget_stale()
            if self._resting:
                self._prepare()

    def begin(self) -> None:
        """Marks the start of training: no more batches are packed ahead."""
        with self._changed:
            self._resting = False

    def end(self) -> None:
        """Marks the end of training."""
        with self._changed:
            self._resting = True
            self._prepare()

    def next(self) -> PackedBatch | None:
        """The next batch; None without usable rows."""
        with self._changed:
            ranks, _ = self.shape()
            while self._ready:
                ready = self._ready.popleft()
                if len(ready.rows) == ranks and ready.head.hash in self.heads:
                    return ready
            return self._draw()

    def wait(self, timeout_s: float) -> None:
        """Returns when rows have arrived, or after the time-out."""
        with self._changed:
            self._changed.wait(timeout_s)

    @contextmanager
    def locked(self) -> Iterator[FeatureBuffer]:
        """The buffer, which the other thread cannot change during the block."""
        with self._changed:
            yield self._buffer

    def _prepare(self) -> None:
        while len(self._ready) < READY and (batch := self._draw()) is not None:
            self._ready.append(batch)

    def _draw(self) -> PackedBatch | None:
        ranks, tokens = self.shape()
        tokens = min(tokens, max(1, self._batch_bytes // self._position_bytes))
        samples = self._buffer.draw(
            tokens * ranks, known=self.heads, at_least=ranks, teach=self._teach
        )
        if not samples:
            return None
        head = self.heads[samples[0].lm_head_hash]
        window = self._config.window
        rows = [_placed(pack(samples[rank::ranks], window=window)) for rank in range(ranks)]
        traces = frozenset(one.traceparent for one in samples) - {""}
        return PackedBatch(rows, head, len(samples), traces)

    def _teach(self, sample: FeatureSample) -> None:
        sample.teach(self.heads[sample.lm_head_hash])

    def _forget_stale(self) -> None:
        """Keeps rows of a version with a head still in transit; drops older rows without a head,
        which can never be used.
        """
        newest = next(reversed(self.heads.values())).policy_version
        self._buffer.forget(
            lambda s: s.lm_head_hash in self.heads or s.policy_version > newest, "stale_head"
        )


def _placed(row: PackedRow) -> PackedRow:
    """The row with the length of the fastest products; in pinned memory if there is a GPU, so that
    copies run beside its work.
    """
    if spare := spare_rows(row.states):
        row = row.padded(spare)
    return row.changed(lambda _, t: t.pin_memory()) if torch.cuda.is_available() else row


GROUP, CONSUMER = "drafter", "rank0"
ENTRIES_PER_READ = 32
"""Small, so that a batch of long rows does not delay the rest."""
READ_S, ANSWER_S = 0.2, 2.0
"""Seconds that a read waits for rows, and maximum time of an answer."""
RETRY_S = 1.0
OPEN_S = 10.0
CLOSE_S = 5.0

log = telemetry.get_logger("drafter_trainer.feed")


class RowFeed:
    """Passes every sample to `take`, from its thread; entries leave the stream once decoded.

    While Redis is away or full, only the rows that it drops are lost.
    """

    def __init__(
        self,
        open_stream: Callable[[], RedisStream],
        target: ModelConfig,
        take: Callable[[list[FeatureSample]], None],
    ) -> None:
        """`open_stream`: called in the thread, which needs its own connections."""
        self._open_stream, self._target, self._take = open_stream, target, take
        self._dropped: Counter[str] = Counter()  # counted by the thread
        self._counting = threading.Lock()
        self._opened = threading.Event()
        self._closing = threading.Event()
        self._holds = True  # entries of an earlier process or a failed read
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="row-feed", daemon=True)

    @property
    def dropped(self) -> Counter[str]:
        """Entries that yielded no sample so far, by reason."""
        with self._counting:
            return self._dropped.copy()

    def start(self) -> None:
        """Returns once the group exists, so that no later batch is missed, or after OPEN_S. If
        Redis is away, the group is created later.
        """
        self._thread.start()
        self._opened.wait(OPEN_S)

    def check(self) -> None:
        """Raises the error that ended the thread, if any."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self.join(CLOSE_S)

    def join(self, timeout_s: float) -> None:
        """Waits for the thread to end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            asyncio.run(self._follow())
        except BaseException as error:
            self._failure = error
            raise

    async def _follow(self) -> None:
        stream = self._open_stream()
        try:
            while not self._closing.is_set():
                await self._step(stream)
        finally:
            await stream.close()

    async def _step(self, stream: RedisStream) -> None:
        try:
            if not self._opened.is_set():
                await stream.create_group(GROUP)
                self._opened.set()
            await self._read(stream)
        except (ResourceExhausted, Unavailable, TimeoutError) as error:
            self._holds = True
            log.warning("features cannot be read now", error=str(error) or "no answer in time")
            await asyncio.sleep(RETRY_S)

    async def _read(self, stream: RedisStream) -> None:
        async with asyncio.timeout(ANSWER_S):
            entries = await stream.unacked(GROUP, CONSUMER) if self._holds else []
            self._holds = False
            entries += await stream.read(GROUP, CONSUMER, ENTRIES_PER_READ, READ_S)
        if not entries:
            return
        with span(
            names.FEATURES_READ,
            kind="consumer",
            links=[entry.fields.get("traceparent", "") for entry in entries],
        ):
            usable = {
                entry.id: sample
                for entry in entries
                if (sample := await self._decode(stream, entry)) is not None
            }
            self._take(list(usable.values()))
            await stream.ack(GROUP, list(usable))

    async def _decode(self, stream: RedisStream, entry: Entry) -> FeatureSample | None:
        try:
            sample = sample_from(decode_features(entry.fields, entry.payload), self._target)
            return replace(sample, traceparent=entry.fields.get("traceparent", ""))
        except DataLoss as error:
            with self._counting:
                self._dropped["unusable"] += 1
            SAMPLES_DROPPED.record(reason="unusable")
            log.warning("feature batch cannot be used", entry=entry.id, error=str(error))
            await stream.dead_letter(GROUP, entry, str(error))
            return None
