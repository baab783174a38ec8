"""Holds a drafter's training rows: they arrive in one thread while another trains on them."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from paceline.models.products import spare_rows
from paceline.services.drafter_trainer.config import BufferConfig
from paceline.services.drafter_trainer.learn.heads import PolicyHead, PolicyHeads
from paceline.services.drafter_trainer.rows.buffer import FeatureBuffer
from paceline.services.drafter_trainer.rows.sample import FeatureSample, pack
from paceline.speculators.packed import PackedRow

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

    def __init__(self, config: BufferConfig, seed: int, batch_bytes: int) -> None:
        """`batch_bytes`: most bytes of captured states in a row."""
        self._config, self.heads, self._batch_bytes = config, PolicyHeads(), batch_bytes
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
                self._buffer.add(sample)
                self._position_bytes = 4 * (sample.hidden.shape[1] + sample.hidden_size)
            self._forget_stale()
            if self._resting:
                self._prepare()
            self._changed.notify_all()

    # --- the thread that trains -------------------------------------------------------------------

    def add_head(self, head: PolicyHead) -> None:
        """Adds a head as the newest. Rows of dropped heads and earlier packed batches are
        removed.
        """
        with self._changed:
            self.heads.add(head)
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
                if len(ready.rows) == ranks and ready.head.hash in self.heads.hashes:
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
        known = set(self.heads.hashes)
        samples = self._buffer.draw(tokens * ranks, known=known, at_least=ranks)
        if not samples:
            return None
        head = self.heads.get(samples[0].lm_head_hash)
        assert head is not None
        window = self._config.window
        rows = [_placed(pack(samples[rank::ranks], window=window)) for rank in range(ranks)]
        traces = frozenset(one.traceparent for one in samples) - {""}
        return PackedBatch(rows, head, len(samples), traces)

    def _forget_stale(self) -> None:
        """Keeps rows of a version with a head still in transit; drops older rows without a head,
        which can never be used.
        """
        known, newest = set(self.heads.hashes), self.heads.newest.policy_version
        self._buffer.forget(
            lambda s: s.lm_head_hash in known or s.policy_version > newest, "stale_head"
        )


def _placed(row: PackedRow) -> PackedRow:
    """The row with the length of the fastest products; in pinned memory if there is a GPU, so that
    copies run beside its work.
    """
    if spare := spare_rows(row.states):
        row = row.padded(spare)
    return row.changed(lambda _, t: t.pin_memory()) if torch.cuda.is_available() else row
