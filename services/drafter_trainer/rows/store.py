"""Holds what a drafter learns from: rows arrive from one thread while another trains on them."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.models.products import spare_rows
from paceline.services.drafter_trainer.config import BufferConfig
from paceline.services.drafter_trainer.learn.heads import PolicyHead, PolicyHeads
from paceline.services.drafter_trainer.rows.batcher import pack
from paceline.services.drafter_trainer.rows.buffer import FeatureBuffer
from paceline.services.drafter_trainer.rows.sample import FeatureSample
from paceline.speculators.packed import PackedRow

READY = 4
"""Batches that are packed before a lease begins."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch: a row for each rank, all of one policy head."""

    rows: list[PackedRow]
    head: PolicyHead
    samples: int
    traceparents: frozenset[str]  # of the entries it is made from


class RowStore:
    """The buffer behind a lock, and the batches that a lease begins with, packed while nobody
    trains.
    """

    def __init__(
        self, config: BufferConfig, heads: PolicyHeads, seed: int, *, batch_bytes: int
    ) -> None:
        """batch_bytes: of captured states in a row, at most."""
        self._config, self.heads, self._batch_bytes = config, heads, batch_bytes
        self._buffer = FeatureBuffer(config, seed)
        self._changed = threading.Condition(threading.RLock())
        self._ready: deque[PackedBatch] = deque()
        self._resting = True
        self._position_bytes = 1  # of the states of one position, as it is trained on
        self.shape: Callable[[], tuple[int, int]] = lambda: (1, 32)
        """Ranks that train next, and tokens of the row of one."""

    # --- the thread that reads --------------------------------------------------------------------

    def add(self, samples: Sequence[FeatureSample]) -> None:
        """Takes what has arrived; while nobody trains, packs what a lease will begin with."""
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
        """Keeps a head as the newest. Rows of one that is not kept any more go, and batches that
        were packed before.
        """
        with self._changed:
            self.heads.add(head)
            self._ready.clear()
            self._forget_stale()
            if self._resting:
                self._prepare()

    def begin(self) -> None:
        """Somebody trains: nothing more is packed ahead."""
        with self._changed:
            self._resting = False

    def end(self) -> None:
        """Nobody trains any more."""
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
        """Returns when rows have arrived, or after so many seconds."""
        with self._changed:
            self._changed.wait(timeout_s)

    def fresh(self, at_least: int, groups: int, most: int) -> list[FeatureSample]:
        """See FeatureBuffer.fresh; the last so many."""
        with self._changed:
            return self._buffer.fresh(self.heads.hashes, at_least, groups)[-most:]

    def newest(self, most: int) -> list[FeatureSample]:
        """See FeatureBuffer.newest; the last so many."""
        with self._changed:
            return self._buffer.newest(self.heads.hashes)[-most:]

    def release(self, samples: Sequence[FeatureSample]) -> None:
        """See FeatureBuffer.release."""
        with self._changed:
            self._buffer.release(samples)

    @property
    def usable(self) -> int:
        """Training positions held of policy heads that are known."""
        with self._changed:
            return self._buffer.tokens_of(self.heads.hashes)

    @property
    def tokens(self) -> int:
        """Training positions held."""
        with self._changed:
            return self._buffer.tokens

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._buffer.nbytes

    @property
    def dropped(self) -> Counter[str]:
        """Samples that were let go up to now, by reason."""
        with self._changed:
            return self._buffer.dropped.copy()

    def __len__(self) -> int:
        return len(self._buffer)

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
        """Rows of a version whose head is still on its way wait; older ones without a head can
        never be used.
        """
        known, newest = set(self.heads.hashes), self.heads.newest.policy_version
        self._buffer.forget(
            lambda s: s.lm_head_hash in known or s.policy_version > newest, "stale_head"
        )


def _placed(row: PackedRow) -> PackedRow:
    """As long as products are quickest, in memory that a GPU copies from beside its work, where
    there is one.
    """
    if spare := spare_rows(row.states):
        row = row.padded(spare)
    return row.pinned() if torch.cuda.is_available() else row
