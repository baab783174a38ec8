"""Places sequences in the rows of each step.

The rows depend only on the seed and the step. A resumed run therefore continues with the same rows,
for any number of ranks with the same rows per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice

import numpy as np
import torch
from torch import Tensor

from paceline.services.drafter_trainer.offline.data import Example
from paceline.training.packing import first_fit

OPEN_ROWS = 32


@dataclass(frozen=True, slots=True)
class Document:
    """A sequence in a row, and its part that the drafter learns from."""

    sample: Example
    start: int
    """First position of the window; position t pairs token t's state with token t + 1."""
    length: int
    """Positions of the window, of at most len(sample) - 2."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Tokens int64 and mask bool of the whole sequence."""
        return torch.from_numpy(self.sample.token_ids), torch.from_numpy(self.sample.mask)

    @property
    def targets(self) -> int:
        """Positions of the window with a drafting target."""
        return int(self.sample.mask[self.start + 2 : self.start + 2 + self.length].sum())


def split(
    samples: Sequence[Example], share: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """(training, held-out) samples; with a share above 0, each list has at least one sample."""
    held = min(max(1, round(share * len(samples))), len(samples) - 1) if share > 0 else 0
    order = np.random.default_rng([seed, 1]).permutation(len(samples))
    return [samples[i] for i in sorted(order[held:])], [samples[i] for i in sorted(order[:held])]


def epoch_rows(lengths: Sequence[int], row_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Rows of one pass over the data, shuffled by seed and epoch."""
    order = np.random.default_rng([seed, 2, epoch]).permutation(len(lengths))
    return first_fit(lengths, row_tokens, order.tolist(), open_rows=OPEN_ROWS)


def steps_of(
    lengths: Sequence[int], row_tokens: int, seed: int, *, epochs: int, rows_per_step: int
) -> int:
    """Number of optimiser steps of `epochs` passes; the last step is filled up from the
    next pass.
    """
    rows = sum(len(epoch_rows(lengths, row_tokens, seed, epoch)) for epoch in range(epochs))
    return -(-rows // rows_per_step)


def steps_from(
    samples: Sequence[Example],
    row_tokens: int,
    window: int,
    seed: int,
    *,
    rows_per_step: int,
    first: int,
) -> Iterator[list[list[Document]]]:
    """Endless rows of step `first`, `first` + 1, ..., pass after pass."""
    lengths = [len(sample) for sample in samples]
    every = chain.from_iterable(epoch_rows(lengths, row_tokens, seed, epoch) for epoch in count())
    rows = islice(every, first * rows_per_step, None)
    for step in count(first):
        random = np.random.default_rng([seed, 3, step])
        yield [
            [place(samples[i], window, random) for i in row] for row in islice(rows, rows_per_step)
        ]


def place(sample: Example, window: int, random: np.random.Generator) -> Document:
    """A random window of the sequence with at least one drafting target; its centre is a uniformly
    drawn target.
    """
    positions = len(sample) - 2
    if positions <= window:
        return Document(sample, 0, positions)
    target = int(random.choice(np.flatnonzero(sample.mask[2:])))
    return Document(sample, min(max(target - window // 2, 0), positions - window), window)
