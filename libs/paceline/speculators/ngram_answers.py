"""Keeps the answers to each prompt by their last policy version, and counts contexts for prompts
being answered.

A kept answer takes 4 bytes a token, a counted answer 200 to 400 bytes a token. So the answers to
all prompts of an epoch may be kept, and they are counted when the prompt is requested again. The
module follows Shao et al. 2025 (DAS, arXiv 2511.13841), with counts instead of a suffix tree per
prompt.
"""

from __future__ import annotations

import heapq
import sys
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

CONTEXTS = (6, 4, 2)
"""Context lengths looked up among all sequences, in tokens, longest first."""
ANSWER_CONTEXTS = (16, 8, 4, 2)
"""Context lengths looked up among the answers to one prompt, in tokens, longest first. Answers to
one prompt share longer passages.
"""
ANSWERS_FIRST = 4
"""From this context length on, the answers to the prompt take precedence over all sequences. Below
it, the longer of the two contexts decides: after two tokens of the prompt's own answers, the
continuation is chance if the policy is unsure.
"""
TABLE_CONTEXTS = 1 << 18
"""Most kept contexts of all sequences; a context takes some 300 bytes."""
PRIOR = 1.0
"""Assumed occurrences of an unseen token after every context, so that a single occurrence does not
give probability 1.
"""

Counts = dict[int, int]


class Contexts:
    """Context -> count of each next token, for contexts of some lengths. A context takes 50 to 300
    bytes. Beyond the capacity, the contexts that were not seen for long are dropped.
    """

    def __init__(self, sizes: Sequence[int], capacity: int = sys.maxsize) -> None:
        """`sizes`: lengths in tokens, longest first. `capacity`: most contexts."""
        self._sizes, self._half = sizes, max(capacity // 2, 1)
        # Keys are hashes of contexts: tuples take four times the memory, and a collision of 64
        # bits only gives a wrong draft. A bare token has count 1, as most long contexts occur once.
        self._young: dict[int, int | Counts] = {}
        self._old: dict[int, int | Counts] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def learn(self, tokens: list[int], start: int) -> None:
        """Counts the tokens from index `start` on, each after the contexts before it."""
        longest, shortest = self._sizes[0], self._sizes[-1]
        for end in range(max(start, shortest), len(tokens)):
            token, before = tokens[end], tuple(tokens[max(end - longest, 0) : end])
            for size in self._sizes:
                if size <= end:
                    self._count(hash(before[-size:]), token)

    def _count(self, key: int, token: int) -> None:
        seen = self._young.get(key)
        if seen is None:
            if len(self._young) >= self._half:
                self._old, self._young = self._young, {}
            seen = self._old.pop(key, None)
        if seen is None:
            seen = token
        elif isinstance(seen, int):
            seen = {seen: 2} if seen == token else {seen: 1, token: 1}
        else:
            seen[token] = seen.get(token, 0) + 1
        self._young[key] = seen

    def follow(self, context: Sequence[int]) -> tuple[Counts, int]:
        """Counts after the longest suffix of `context` in the table, and its length; ({}, 0) if the
        table has no suffix.
        """
        before = tuple(context[-self._sizes[0] :])
        for size in self._sizes:
            if size <= len(before):
                key = hash(before[-size:])
                seen = self._young.get(key, self._old.get(key))
                if seen is not None:
                    return ({seen: 1} if isinstance(seen, int) else seen), size
        return {}, 0


def likeliest(counts: Counts, topk: int, prior: float = PRIOR) -> list[tuple[int, float]]:
    """The `topk` most frequent tokens with their estimated probabilities, most frequent first.

    Among equal counts, the token with the later first occurrence is preferred.
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
    """Assumed occurrences of an unseen token after a context of `size` tokens of the same prompt's
    answers. The shortest context gets PRIOR. Longer contexts get less, since a long match is seldom
    chance.
    """
    return PRIOR * ANSWER_CONTEXTS[-1] / size


KEPT_BYTES = 1 << 25
"""Most bytes of kept answers: some 25,000 answers of 200 tokens."""
ANSWER_BYTES = 512
"""Bytes counted for an answer besides its tokens: its objects and its prompt's key."""
COUNTED_TOKENS = 1 << 17
"""Most counted tokens of ended answers, over all prompts; tokens of running sequences are
additional.
"""
PROMPT_TOKENS = 1 << 13
"""Most tokens of a prompt's kept answers, the newest: 40 answers of 200 tokens. Counting them again
takes some 15 ms.
"""


def prompt_key(prompt: Sequence[int]) -> bytes:
    """Key of a prompt's answers."""
    return blake2b(array("q", prompt).tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """An answer, and the policy version that drew its last token."""

    tokens: array[int]
    version: int


class KeptAnswers:
    """Answers by prompt, oldest first. Beyond the budget, the least recently requested prompts are
    dropped.
    """

    def __init__(
        self, versions: int, most_bytes: int = KEPT_BYTES, prompt_tokens: int = PROMPT_TOKENS
    ) -> None:
        """versions: policy versions after which an answer is dropped."""
        self._versions, self._most = versions, most_bytes
        self._prompt_tokens = prompt_tokens
        self._answers: OrderedDict[bytes, list[EndedAnswer]] = OrderedDict()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def keep(self, prompt: bytes, tokens: Sequence[int], version: int) -> None:
        """Adds an answer; an answer above the limit is cut to its beginning."""
        answer = EndedAnswer(array("i", tokens[: self._prompt_tokens]), version)
        self._put(prompt, [*self._answers.get(prompt, ()), answer], version)
        while self.held_bytes > self._most:
            _, oldest = self._answers.popitem(last=False)
            self.held_bytes -= _bytes(oldest)

    def of(self, prompt: bytes, version: int) -> list[EndedAnswer]:
        """The prompt's answers still valid under policy `version`, oldest first."""
        if prompt not in self._answers:
            return []
        return self._put(prompt, self._answers[prompt], version)

    def outlived(self, drawn: int, version: int) -> bool:
        """Whether an answer drawn under one version is too old for another."""
        return version - drawn > self._versions

    def _put(self, prompt: bytes, answers: list[EndedAnswer], version: int) -> list[EndedAnswer]:
        """Stores the answers within the budget and returns them; the prompt counts as the most
        recently requested.
        """
        self.held_bytes -= _bytes(self._answers.pop(prompt, []))
        fresh = [one for one in answers if not self.outlived(one.version, version)]
        kept = newest(fresh, self._prompt_tokens)
        if kept:
            self._answers[prompt] = kept
            self.held_bytes += _bytes(kept)
        return kept


@dataclass(eq=False, slots=True)
class PromptAnswers:
    """Context counts of the answers to one prompt, including running sequences as far as they were
    read.
    """

    contexts: Contexts
    ended: int  # tokens of ended answers in it
    oldest: int  # policy version of the oldest answer; without answers, the version at its creation


class AnswerStore:
    """Context counts, from the kept answers, of prompts being answered."""

    def __init__(self, kept: KeptAnswers, tokens: int = COUNTED_TOKENS) -> None:
        self._kept, self._most = kept, tokens
        self._counted: dict[bytes, PromptAnswers] = {}
        self._running: Counter[bytes] = Counter()  # running sequences by prompt
        self.tokens = 0

    def begin(self, prompt: bytes) -> None:
        """Registers one more running sequence of a prompt."""
        self._running[prompt] += 1

    def counted(
        self, prompt: bytes, tokens: Sequence[int], length: int, version: int
    ) -> PromptAnswers:
        """The counts of a prompt (the first `length` tokens), without answers too old for policy
        `version`.

        After a recount this is a new object, without the running sequences.
        """
        found = self._counted.get(prompt)
        if found is not None and not self._kept.outlived(found.oldest, version):
            return found
        self.discard(prompt)
        front = list(tokens[max(length - ANSWER_CONTEXTS[0], 0) : length])
        # Counts of other prompts stay: dropping them in turn would recount all in each round.
        answers = newest(self._kept.of(prompt, version), self._most - self.tokens)
        contexts = Contexts(ANSWER_CONTEXTS)
        for one in answers:
            contexts.learn([*front, *one.tokens], len(front))
        oldest = min((one.version for one in answers), default=version)
        self._counted[prompt] = PromptAnswers(contexts, _extent(answers), oldest)
        self.tokens += _extent(answers)
        return self._counted[prompt]

    def end(self, prompt: bytes, answer: Sequence[int], version: int) -> None:
        """Adds a finished sequence of the prompt to the kept answers; the counts contain it
        already. They are dropped with the prompt's last running sequence.
        """
        self._stop(prompt)
        if answer:
            self._kept.keep(prompt, answer, version)
        found = self._counted.get(prompt)
        if found is None:
            return
        found.ended += len(answer)
        found.oldest = min(found.oldest, version)
        self.tokens += len(answer)
        if self.tokens > self._most or prompt not in self._running:
            self.discard(prompt)

    def leave(self, prompt: bytes) -> None:
        """Unregisters a sequence that will be read again from its start. The prompt's counts are
        dropped, because the sequence's share of them is unknown.
        """
        self._stop(prompt)
        self.discard(prompt)

    def _stop(self, prompt: bytes) -> None:
        self._running[prompt] -= 1
        if not self._running[prompt]:
            del self._running[prompt]

    def discard(self, prompt: bytes) -> None:
        """Drops the prompt's counts; they are made anew on the next request."""
        found = self._counted.pop(prompt, None)
        if found is not None:
            self.tokens -= found.ended


def newest(answers: Sequence[EndedAnswer], tokens: int) -> list[EndedAnswer]:
    """The last answers that together have at most that many tokens."""
    first, room = len(answers), tokens
    while first > 0 and len(answers[first - 1].tokens) <= room:
        first -= 1
        room -= len(answers[first].tokens)
    return list(answers[first:])


def _extent(answers: Sequence[EndedAnswer]) -> int:
    return sum(len(one.tokens) for one in answers)


def _bytes(answers: Sequence[EndedAnswer]) -> int:
    return sum(len(one.tokens) * one.tokens.itemsize + ANSWER_BYTES for one in answers)
