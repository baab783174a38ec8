"""Drafts the earlier continuations of the last tokens: from the answers to the same prompt, then
from all text of this engine.

Prompt lookup (Saxena 2023), suffix decoding (Oliaro et al. 2024, arXiv 2411.04975) and its form for
RL, a history per prompt (Shao et al. 2025, arXiv 2511.13841), by counted contexts. Contexts are the
last 16, 8, 4 or 2 tokens in the answers to this prompt, earlier and running ones, and the last 6, 4
or 2 tokens in all sequences. The longest matching context proposes. From four tokens on, the
prompt's own contexts take precedence. Both tables are bounded (ngram_answers.py).
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from paceline.speculators import base, ngram_answers


@dataclass(eq=False, slots=True)
class ReadSequence:
    """The part read so far of the sequence in a slot."""

    tokens: list[int] = field(default_factory=list)
    prompt: int = 0  # number of prompt tokens
    key: bytes = b""  # of the prompt; empty: answers are not counted
    # counts with this answer as far as it was read
    answers: ngram_answers.PromptAnswers | None = None


class NgramSpeculator(base.Speculator):
    """The speculator "ngram" (see speculators/base.py for the methods)."""

    capture = base.CaptureSpec(last=False)

    def __init__(self, setup: base.SpeculatorSetup) -> None:
        self._read = [ReadSequence() for _ in range(setup.slots)]
        self._versions = setup.answer_versions
        self.flush()

    def catch_up(self, batch: base.DraftBatch) -> None:
        """Reads the tokens since the last call."""
        known = batch.token_ids.cpu().numpy()
        prompts = batch.prompts or [0] * len(batch.slots)
        for slot, n, prompt in zip(batch.slots, batch.lengths, prompts, strict=True):
            one = self._read[slot]
            start = len(one.tokens)
            if start < n:
                one.tokens.extend(known[slot, start:n].tolist())
                self._table.learn(one.tokens, start)
            if prompt:
                self._count_answer(one, prompt, start, batch.policy_version)

    def _count_answer(self, one: ReadSequence, prompt: int, start: int, version: int) -> None:
        """Counts a sequence's tokens from index `start` on among the answers to its prompt."""
        if not one.key:
            one.prompt, one.key = prompt, ngram_answers.prompt_key(one.tokens[:prompt])
            self._answers.begin(one.key)
        answers = self._answers.counted(one.key, one.tokens, one.prompt, version)
        if answers is not one.answers:
            one.answers, start = answers, prompt
        answers.contexts.learn(one.tokens, max(start, prompt))

    def propose(self, batch: base.DraftBatch, shape: base.DraftShape) -> base.Drafts:
        """The most frequent continuations; -1 without one."""
        self.catch_up(batch)
        rows, nodes = len(batch.slots), shape.drafts
        tokens = np.full((rows, nodes), -1, dtype=np.int64)
        scores = np.ones((rows, nodes), dtype=np.float32)
        parents = np.zeros((rows, nodes), dtype=np.int64)
        for row, slot in enumerate(batch.slots):
            for node, (token, score, parent) in enumerate(self._grow(self._read[slot], shape)):
                tokens[row, node], scores[row, node], parents[row, node] = token, score, parent
        device = batch.token_ids.device
        drafts = base.Drafts(
            *(torch.from_numpy(one).to(device) for one in (tokens, scores, parents))
        )
        return replace(drafts, parents=None) if shape.topk == 1 else drafts

    def _grow(self, one: ReadSequence, shape: base.DraftShape) -> Iterator[tuple[int, float, int]]:
        """(token, score, parent) of the likeliest nodes within the shape, best first, hence parents
        first.
        """
        longest = ngram_answers.ANSWER_CONTEXTS[0]
        # (-score, age, token, parent, context): the older node wins a tie.
        heap: list[tuple[float, int, int, int, tuple[int, ...]]] = []
        node, age, context, score, level = 0, 0, tuple(one.tokens[-longest:]), 1.0, 0
        levels = {0: 0}
        while True:
            if level < shape.steps:
                for token, share in self._next(one.answers, context, shape.topk):
                    age += 1
                    heapq.heappush(heap, (-score * share, age, token, node, context))
            if not heap or len(levels) > shape.drafts or -heap[0][0] < shape.floor:
                return
            negative, _, token, parent, context = heapq.heappop(heap)
            score, node, level = -negative, len(levels), levels[parent] + 1
            levels[node] = level
            context = (*context[1 - longest :], token)
            yield token, score, parent

    def _next(
        self, answers: ngram_answers.PromptAnswers | None, context: tuple[int, ...], topk: int
    ) -> list[tuple[int, float]]:
        """The likeliest tokens after a context, with their probabilities."""
        own, size = ({}, 0) if answers is None else answers.contexts.follow(context)
        if size < ngram_answers.ANSWERS_FIRST:
            counts, length = self._table.follow(context)
            if length > size:
                return ngram_answers.likeliest(counts, topk)
        return ngram_answers.likeliest(own, topk, ngram_answers.answer_prior(size)) if own else []

    def ended(self, batch: base.DraftBatch) -> None:
        """Counts the tokens since the last call, and keeps the answers."""
        self.catch_up(batch)
        for slot in batch.slots:
            one, self._read[slot] = self._read[slot], ReadSequence()
            if one.key:
                self._answers.end(one.key, one.tokens[one.prompt :], batch.policy_version)

    def flush(self) -> None:
        """Clears the table and all answers."""
        self._table = ngram_answers.Contexts(ngram_answers.CONTEXTS, ngram_answers.TABLE_CONTEXTS)
        self._answers = ngram_answers.AnswerStore(ngram_answers.KeptAnswers(self._versions))
        for one in self._read:
            one.key, one.answers = b"", None

    def free(self, slot: int) -> None:
        """Clears the slot. If its sequence has not ended, only the common table keeps its
        counts.
        """
        one, self._read[slot] = self._read[slot], ReadSequence()
        if one.key:
            self._answers.leave(one.key)

    def move(self, source: int, destination: int, length: int) -> None:
        """Moves a sequence's tokens to another slot."""
        self.free(destination)
        self._read[destination], self._read[source] = self._read[source], ReadSequence()
