"""Drafts by looking up how the last tokens went on before, in all that this engine has seen.

Prompt lookup (Saxena 2023) and suffix decoding (Oliaro et al. 2024, arXiv 2411.04975) in one table:
for each context of the last 2, 4 or 6 tokens, how often which token came next, in this prompt and
answer and in those before. The longest context that occurred proposes; one answer of a task drafts
for the next one from the first step of training on. The table is bounded: when half of it is full,
the older half is dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.errors import MissingCapability
from paceline.models.decoder import DecoderWeights
from paceline.speculators.base import CaptureSpec, DraftBatch, Drafts, DraftShape, SpeculatorSetup

CONTEXTS = (6, 4, 2)
"""Lengths looked up, longest first."""
TABLE_CONTEXTS = 1 << 18
"""Contexts remembered at most; some 300 bytes each."""
PRIOR = 1.0
"""Occurrences of "something else" that every context is given, so that one sighting is no
certainty.
"""

Counts = dict[int, int]


class ContextTable:
    """Context -> how often each token came next."""

    def __init__(self, capacity: int = TABLE_CONTEXTS) -> None:
        self._half = max(capacity // 2, 1)
        self._young: dict[tuple[int, ...], Counts] = {}
        self._old: dict[tuple[int, ...], Counts] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def learn(self, tokens: list[int], start: int) -> None:
        """Count the tokens from index `start` on, each after the contexts before it."""
        for end in range(max(start, CONTEXTS[-1]), len(tokens)):
            token = tokens[end]
            for size in CONTEXTS:
                if size <= end:
                    counts = self._own(tuple(tokens[end - size : end]))
                    counts[token] = counts.get(token, 0) + 1

    def follow(self, context: list[int]) -> Counts:
        """Counts after the longest suffix of `context` that occurred; empty when none did."""
        for size in CONTEXTS:
            if size <= len(context):
                key = tuple(context[-size:])
                counts = self._young.get(key) or self._old.get(key)
                if counts:
                    return counts
        return {}

    def _own(self, key: tuple[int, ...]) -> Counts:
        counts = self._young.get(key)
        if counts is None:
            if len(self._young) >= self._half:
                self._old, self._young = self._young, {}
            counts = self._young[key] = self._old.pop(key, {})
        return counts


class NgramSpeculator:
    """The speculator "ngram" (see speculators/base.py for the methods)."""

    name = "ngram"
    trainable = False
    capture = CaptureSpec(last=False)

    def __init__(self, setup: SpeculatorSetup) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(setup.slots)]
        self._table = ContextTable()

    def catch_up(self, batch: DraftBatch) -> None:
        """Takes in the tokens that came since the last call."""
        known = batch.token_ids.cpu().numpy()
        for slot, n in zip(batch.slots, batch.lengths, strict=True):
            tokens = self._tokens[slot]
            start = len(tokens)
            if start < n:
                tokens.extend(known[slot, start:n].tolist())
                self._table.learn(tokens, start)

    def propose(self, batch: DraftBatch, shape: DraftShape) -> Drafts:
        """The most frequent continuations; -1 where none was seen."""
        self.catch_up(batch)
        rows, nodes = len(batch.slots), shape.drafts
        tokens = np.full((rows, nodes), -1, dtype=np.int64)
        scores = np.ones((rows, nodes), dtype=np.float32)
        parents = np.zeros((rows, nodes), dtype=np.int64)
        for row, slot in enumerate(batch.slots):
            for node, (token, score, parent) in enumerate(self._grow(self._tokens[slot], shape)):
                tokens[row, node], scores[row, node], parents[row, node] = token, score, parent
        return _drafts(tokens, scores, None if shape.topk == 1 else parents, batch.token_ids.device)

    def _grow(self, known: list[int], shape: DraftShape) -> Iterator[tuple[int, float, int]]:
        """(token, score, parent) of the likeliest nodes within the shape, best first, hence parents
        first.
        """
        longest = CONTEXTS[0]
        # (-score, age, token, parent, context): ties go to the older node.
        heap: list[tuple[float, int, int, int, list[int]]] = []
        node, age, context, score, level = 0, 0, known[-longest:], 1.0, 0
        levels = {0: 0}
        while True:
            if level < shape.steps:
                for token, share in _likeliest(self._table.follow(context), shape.topk):
                    age += 1
                    heapq.heappush(heap, (-score * share, age, token, node, context))
            if not heap or len(levels) > shape.drafts or -heap[0][0] < shape.floor:
                return
            negative, _, token, parent, context = heapq.heappop(heap)
            score, node, level = -negative, len(levels), levels[parent] + 1
            levels[node] = level
            context = [*context[1 - longest :], token]
            yield token, score, parent

    def ended(self, batch: DraftBatch) -> None:
        """Counts the tokens that came since the last call."""
        self.catch_up(batch)

    def flush(self) -> None:
        """Empties the table."""
        self._table = ContextTable()

    def free(self, slot: int) -> None:
        """Another sequence comes; what was counted of this one stays."""
        self._tokens[slot] = []

    def move(self, source: int, destination: int, length: int) -> None:
        """Hand a sequence's tokens to another slot."""
        self._tokens[destination], self._tokens[source] = self._tokens[source], []

    def bind(self, target: DecoderWeights) -> None:
        """Reads no weights; what an older policy wrote is still the best guess."""

    def load_state(self, directory: Path) -> object:
        """Raises MissingCapability: there is nothing to train."""
        raise MissingCapability("the n-gram speculator has no weights to swap", seen=directory)

    def commit_state(self, state: object) -> None:
        """Raises MissingCapability: there is nothing to train."""
        raise MissingCapability("the n-gram speculator has no weights to swap")


def _likeliest(counts: Counts, topk: int) -> list[tuple[int, float]]:
    """Tokens and their estimated probability, most frequent first; of equals the newer one."""
    if not counts:
        return []
    total = sum(counts.values()) + PRIOR
    if topk == 1:
        token = max(reversed(counts), key=counts.__getitem__)
        return [(token, counts[token] / total)]
    return [
        (token, counts[token] / total)
        for token in heapq.nlargest(topk, reversed(counts), key=counts.__getitem__)
    ]


def _drafts(
    tokens: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float32],
    parents: npt.NDArray[np.int64] | None,
    device: torch.device,
) -> Drafts:
    def given(values: npt.NDArray[np.int64] | npt.NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Drafts(given(tokens), given(scores), None if parents is None else given(parents))
