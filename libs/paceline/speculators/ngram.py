"""Drafts by looking up how the last tokens went on before, in the prompt and the output so far. Needs no training.

Prompt lookup (Saxena 2023): the longest suffix of at most `longest` tokens that occurred earlier is followed by what
came after its latest occurrence. Owns one index per slot, bounded by the slot's capacity.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.errors import MissingCapability
from paceline.models.decoder import DecoderWeights
from paceline.speculators.base import CaptureSpec, DraftBatch, SpeculatorSetup

LONGEST, SHORTEST = 4, 2


class _Index:
    """Where each n-gram of one sequence was last followed by something."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.follows: dict[tuple[int, ...], int] = {}

    def extend(self, known: npt.NDArray[np.int64]) -> None:
        """Take in tokens [n] of which the first len(self.tokens) are known already."""
        start = len(self.tokens)
        self.tokens.extend(known[start:].tolist())
        for end in range(max(start, 1), len(self.tokens)):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self.follows[tuple(self.tokens[end - size : end])] = end

    def continuation(self, steps: int) -> list[int]:
        """Up to `steps` tokens; empty when no suffix occurred before. A match that reaches the end repeats itself."""
        for size in range(min(LONGEST, len(self.tokens)), SHORTEST - 1, -1):
            at = self.follows.get(tuple(self.tokens[-size:]))
            if at is not None:
                out = self.tokens[at : at + steps]
                while len(out) < steps:
                    out.append(out[at + len(out) - len(self.tokens)])
                return out
        return []


class NgramSpeculator:
    """The speculator "ngram" (see speculators/base.py for the methods)."""

    name = "ngram"
    trainable = False
    capture = CaptureSpec(layers="")

    def __init__(self, setup: SpeculatorSetup) -> None:
        self._indexes = [_Index() for _ in range(setup.slots)]

    def catch_up(self, batch: DraftBatch) -> None:
        """Indexes are brought up to date by `propose`; that costs next to nothing."""

    def propose(self, batch: DraftBatch, steps: int) -> Tensor:
        """int64 [B, steps]; -1 where nothing was found."""
        drafts = np.full((len(batch.slots), steps), -1, dtype=np.int64)
        known = batch.token_ids.cpu().numpy()
        for row, (slot, n) in enumerate(zip(batch.slots, batch.lengths, strict=True)):
            index = self._indexes[slot]
            index.extend(known[slot, :n])
            found = index.continuation(steps)
            drafts[row, : len(found)] = found
        return torch.from_numpy(drafts).to(batch.token_ids.device)

    def free(self, slot: int) -> None:
        """Forget a slot."""
        self._indexes[slot] = _Index()

    def move(self, source: int, destination: int, length: int) -> None:
        """Hand a sequence's index to another slot."""
        self._indexes[destination], self._indexes[source] = self._indexes[source], _Index()

    def bind(self, target: DecoderWeights) -> None:
        """Reads no weights."""

    def load_state(self, directory: Path) -> object:
        """Raises MissingCapability: there is nothing to train."""
        raise MissingCapability("the n-gram speculator has no weights to swap", seen=directory)

    def commit_state(self, state: object) -> None:
        """Raises MissingCapability: there is nothing to train."""
        raise MissingCapability("the n-gram speculator has no weights to swap")
