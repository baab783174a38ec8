"""Counts which token came after which last tokens.

Two tables: of all that an engine has seen, bounded by forgetting its older half; and of the answers
to one prompt, made anew from those that are kept (answers.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

CONTEXTS = (6, 4, 2)
"""Lengths looked up among all sequences, longest first."""
ANSWER_CONTEXTS = (16, 8, 4, 2)
"""Lengths looked up among the answers to one prompt, longest first; answers to one prompt share
longer passages.
"""
ANSWERS_FIRST = 4
"""From this length on, what the answers to the prompt say comes before what all sequences say;
shorter, the longer of the two contexts decides, since two tokens of a prompt's own are followed by
chance where the policy is not sure.
"""
TABLE_CONTEXTS = 1 << 18
"""Contexts of all sequences remembered at most; some 300 bytes each."""
PRIOR = 1.0
"""Occurrences of "something else" that every context is given, so that one sighting is no
certainty.
"""

Counts = dict[int, int]


class ContextTable:
    """Context -> how often each token came next, in all sequences."""

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

    def follow(self, context: Sequence[int]) -> tuple[Counts, int]:
        """Counts after the longest suffix of `context` that occurred, and its length; ({}, 0) when
        none did.
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
    """Context -> how often each token came next, in the answers to one prompt; 200 to 400 bytes a
    token, the less the more the answers are alike.
    """

    def __init__(self) -> None:
        # By the hash of the context, which a tuple would hold four times over (a collision of 64
        # bits is a wrong draft). A token alone came once: most long contexts occur once.
        self._next: dict[int, int | Counts] = {}

    def learn(self, tokens: list[int], start: int) -> None:
        """Count the tokens from index `start` on, each after the contexts before it."""
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
    """Tokens and their estimated probability, most frequent first; of equals the newer one."""
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
    """Occurrences of "something else" after a context of `size` tokens of the same prompt's
    answers: as much as PRIOR after the shortest, and the less the longer, since a long one is
    seldom there by chance.
    """
    return PRIOR * ANSWER_CONTEXTS[-1] / size
