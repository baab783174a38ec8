"""The message tree of a session: model turns as the ids that the engine produced.

A turn's tokens are its parent's, then the new ones of its prompt, then the model's answer. An
answer is never tokenised again: a request that extends a known history adds only the tokens after
it, and a changed history begins a fork.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.services.rollout_gateway.chat.messages import Message
from paceline.trajectory import DrawSpan, SpeculationStats, VersionSpan


@dataclass(eq=False, slots=True)
class Turn:
    """One generation. Token counts: P of `prompt_ids`, R of `response_ids`."""

    completion_id: str  # its name for the agent
    parent: Turn | None
    prompt_ids: tuple[int, ...]  # [P] read by the engine after the parent's tokens
    response_ids: tuple[int, ...]  # [R] drawn by the model
    behavior_logprobs: tuple[float, ...]  # [R]
    version_spans: tuple[VersionSpan, ...]  # counted from the first token of the path
    draw_spans: tuple[DrawSpan, ...]  # likewise
    finish: str  # "stop" | "length"
    seed: int
    temperature: float
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    smallest_gap: float = math.inf  # between the two best draws of any of its tokens
    message: Message | None = None  # as sent to the agent, in a conversation
    digest: bytes = b""  # of the conversation up to this message
    accepted_drafts: tuple[bool, ...] = ()  # [R]; empty: no accepted draft
    reward: float | None = None
    children: list[Turn] = field(default_factory=list)

    @property
    def path(self) -> list[Turn]:
        """Turns from the root to this one."""
        found: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            found.append(turn)
            turn = turn.parent
        return found[::-1]

    @property
    def token_ids(self) -> list[int]:
        """[T] all tokens up to the end of this answer."""
        return [
            token
            for turn in self.path
            for ids in (turn.prompt_ids, turn.response_ids)
            for token in ids
        ]

    @property
    def tokens(self) -> int:
        """Number of tokens that this turn added."""
        return len(self.prompt_ids) + len(self.response_ids)


class MessageTree:
    """Turns of one session in the order of their ends."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.tokens = 0
        self._roots: list[Turn] = []
        self._by_digest: dict[bytes, Turn] = {}
        # characters -> sha256 of that much text -> turn
        self._by_text: dict[int, dict[bytes, Turn]] = {}

    def add(self, turn: Turn, text: str = "") -> None:
        """Adds a finished generation. `text`: of prompt and response, if the prompt was text."""
        (self._roots if turn.parent is None else turn.parent.children).append(turn)
        self.turns.append(turn)
        self.tokens += turn.tokens
        if turn.digest:
            self._by_digest[turn.digest] = turn
        if text:
            self._by_text.setdefault(len(text), {})[_hash(text)] = turn

    def by_id(self, completion_id: str) -> Turn | None:
        """The turn of that name."""
        return next((turn for turn in self.turns if turn.completion_id == completion_id), None)

    def extended_by_messages(self, digests: Sequence[bytes]) -> tuple[Turn, int] | None:
        """The deepest turn that a conversation continues, and the number of messages that it
        covers.
        """
        for count in range(len(digests) - 1, 0, -1):
            turn = self._by_digest.get(digests[count])
            if turn is not None:
                return turn, count
        return None

    def extended_by_text(self, prompt: str) -> tuple[Turn, str] | None:
        """The turn with the longest known text at the beginning of a prompt, and the rest of the
        prompt.
        """
        for length in sorted(self._by_text, reverse=True):
            turn = (
                self._by_text[length].get(_hash(prompt[:length])) if length <= len(prompt) else None
            )
            if turn is not None:
                return turn, prompt[length:]
        return None

    def extended_by_tokens(self, prompt: Sequence[int]) -> tuple[Turn, tuple[int, ...]] | None:
        """The deepest turn with tokens at the beginning of a prompt, and the rest of the prompt."""
        given = tuple(prompt)
        best: tuple[Turn, int] | None = None
        open_turns = [(turn, 0) for turn in self._roots]
        while open_turns:
            turn, start = open_turns.pop()
            end = start + turn.tokens
            if given[start:end] != turn.prompt_ids + turn.response_ids:
                continue
            if best is None or end > best[1]:
                best = (turn, end)
            open_turns.extend((child, end) for child in turn.children)
        return None if best is None else (best[0], given[best[1] :])

    def branches(self) -> Iterator[Branch]:
        """Every path from a root to a leaf; each turn is trained in the first path that contains
        it.
        """
        trained: set[int] = set()
        for leaf in (turn for turn in self.turns if not turn.children):
            path = leaf.path
            yield Branch(tuple(path), tuple(turn for turn in path if id(turn) not in trained))
            trained.update(id(turn) for turn in path)


@dataclass(frozen=True, slots=True)
class Branch:
    """A path of turns as one training sample."""

    path: tuple[Turn, ...]
    # turns with loss here; the other turns have theirs in an earlier branch
    trained: tuple[Turn, ...]


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
