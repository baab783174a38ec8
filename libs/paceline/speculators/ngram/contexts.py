"""Counts the next tokens after contexts of previous tokens.

There are two tables. One covers everything that an engine has seen, and is bounded by dropping its
older half. The other covers the answers to one prompt, counted anew from the kept answers
(answers.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

CONTEXTS = (6, 4, 2)
"""Context lengths over all sequences, longest first."""
ANSWER_CONTEXTS = (16, 8, 4, 2)
"""Context lengths over the answers to one prompt, longest first; answers to one prompt share longer
passages.
"""
ANSWERS_FIRST = 4
"""From this length on, the prompt's answers precede all sequences. Below it, the longer of the two
contexts decides: after two tokens of a prompt's answers, the next one is by chance if the policy is
unsure.
"""
TABLE_CONTEXTS = 1 << 18
"""Most remembered contexts over all sequences; some 300 bytes each."""
PRIOR = 1.0
"""Occurrences of "another token" added to every context, so that one occurrence is no certainty."""

Counts = dict[int, int]


class ContextTable:
    """Context -> number of occurrences of each next token, over all sequences."""

    def __init__(self, capacity: int = TABLE_CONTEXTS) -> None:
        self._half = max(capacity // 2, 1)
        self._young: dict[tuple[int, ...], Counts] = {}
        self._old: dict[tuple[int, ...], Counts] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def learn(self, tokens: list[int], start: int) -> None:
        """Counts the tokens from index `start` on, each after its previous contexts."""
        for end in range(max(start, CONTEXTS[-1]), len(tokens)):
            token = tokens[end]
            for size in CONTEXTS:
                if size <= end:
                    counts = self._own(tuple(tokens[end - size : end]))
                    counts[token] = counts.get(token, 0) + 1

    def follow(self, context: Sequence[int]) -> tuple[Counts, int]:
        """Counts after the longest counted suffix of `context`, and its length; ({}, 0) without
        such a suffix.
        """
        for size in CONTEXTS:
            if size <= len(context):
                key = tuple(context[-size:])
                counts = self._young.get(key) or self._old.get(key)
                if counts:
                    return counts, size
        return {}, 0

    def _own(self, key: tuple[int, ...]) -> Counts:
        counts = self._young.get(key)
        if counts is None:
            if len(self._young) >= self._half:
                self._old, self._young = self._young, {}
            counts = self._young[key] = self._old.pop(key, {})
        return counts


class AnswerContexts:
    """Context -> number of occurrences of each next token, in the answers to one prompt. It takes
    200 to 400 bytes a token, fewer for similar answers.
    """

    def __init__(self) -> None:
        # Keyed by the hash of the context, since a tuple would store it four times (a collision of
        # 64 bits yields a wrong draft). A single token means one occurrence: most long contexts
        # occur once.
        self._next: dict[int, int | Counts] = {}

    def learn(self, tokens: list[int], start: int) -> None:
        """Counts the tokens from index `start` on, each after its previous contexts."""
        table = self._next
        for end in range(max(start, ANSWER_CONTEXTS[-1]), len(tokens)):
            token = tokens[end]
            before = tuple(tokens[max(end - ANSWER_CONTEXTS[0], 0) : end])
            for size in ANSWER_CONTEXTS:
                if size <= end:
                    key = hash(before[-size:])
                    seen = table.get(key)
                    if seen is None:
                        table[key] = token
                    elif isinstance(seen, int):
                        table[key] = {seen: 2} if seen == token else {seen: 1, token: 1}
                    else:
                        seen[token] = seen.get(token, 0) + 1

    def follow(self, context: Sequence[int]) -> tuple[Counts, int]:
        """As ContextTable.follow."""
        before = tuple(context[-ANSWER_CONTEXTS[0] :])
        for size in ANSWER_CONTEXTS:
            if size <= len(before):
                seen = self._next.get(hash(before[-size:]))
                if seen is not None:
                    return ({seen: 1} if isinstance(seen, int) else seen), size
        return {}, 0


def likeliest(counts: Counts, topk: int, prior: float = PRIOR) -> list[tuple[int, float]]:
    """Tokens and their estimated probability, most frequent first; among equal tokens the newer
    first.
    """
    if not counts:
        return []
    total = sum(counts.values()) + prior
    if topk == 1:
        token = max(reversed(counts), key=counts.__getitem__)
        return [(token, counts[token] / total)]
    return [
        (token, counts[token] / total)
        for token in heapq.nlargest(topk, reversed(counts), key=counts.__getitem__)
    ]


def answer_prior(size: int) -> float:
    """Occurrences of "another token" after a context of `size` tokens in the same prompt's answers.
    It equals PRIOR for the shortest context and falls with length, since a long context is seldom
    repeated by chance.
    """
    return PRIOR * ANSWER_CONTEXTS[-1] / size
