"""Selects the scripted engine's response to a prompt: a line by token ids, a reply by text, or a
random draw.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from paceline.errors import ConfigError, InvalidInput
from paceline.models.reading import read_text
from paceline.services.rollout_gateway.testing.scripted.script import (
    Reply,
    ScriptedSpec,
    scripted_response,
)

TOKENS_PER_CHARACTER = 4
"""A UTF-8 character has at most four byte tokens; tokenizers with larger tokens need fewer."""


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """A response and its pace."""

    token_ids: tuple[int, ...]  # end token included
    tokens_per_round: int | None = None  # None: the accept length of the round's arm


@dataclass(frozen=True, slots=True)
class _Reply:
    """A reply with encoded texts."""

    pattern: re.Pattern[str]
    answers: tuple[ScriptedAnswer, ...]


class Script:
    """The answers of one script.

    Raises ConfigError where replies have no tokenizer or it cannot be read, InvalidInput for
    foreign tokens.
    """

    def __init__(self, spec: ScriptedSpec) -> None:
        given = spec.tokenizer
        tokenizer = read_text(Path(given).parent).tokenizer() if given else None
        if spec.replies and tokenizer is None:
            raise ConfigError(
                "replies need the setting `tokenizer`",
                seen="",
                allowed="the path of a tokenizer.json",
            )
        self._spec = spec
        self._tokenizer = tokenizer
        self._prompts = {line.prompt for line in spec.script}
        self._replies = [
            _encoded(reply, spec, tokenizer) for reply in spec.replies if tokenizer is not None
        ]

    def answer(self, prompt: tuple[int, ...], seed: int) -> ScriptedAnswer:
        """The line of exactly this prompt, else the first reply with a matching pattern, else a
        draw.
        """
        if self._replies and prompt not in self._prompts:
            text = self._end_of(prompt)
            for reply in self._replies:
                if reply.pattern.search(text):
                    return reply.answers[seed % len(reply.answers)]
        return ScriptedAnswer(scripted_response(self._spec, prompt, seed))

    def _end_of(self, prompt: tuple[int, ...]) -> str:
        """The last characters of a prompt, with special tokens by name. Only the tokens of this
        window are decoded.
        """
        assert self._tokenizer is not None
        size = self._spec.reply_window_chars
        tail = prompt[-TOKENS_PER_CHARACTER * (size + 1) :]
        return str(self._tokenizer.decode(list(tail), skip_special_tokens=False))[-size:]


def _encoded(reply: Reply, spec: ScriptedSpec, tokenizer: Tokenizer) -> _Reply:
    answers = []
    for text in reply.texts:
        token_ids = (*tokenizer.encode(text, add_special_tokens=False).ids, spec.eos_token_id)
        if max(token_ids) >= spec.vocab_size:
            raise InvalidInput(
                f"a text of the reply {reply.pattern!r} has a token out of range",
                seen=max(token_ids),
                allowed=spec.vocab_size - 1,
            )
        answers.append(ScriptedAnswer(token_ids, reply.tokens_per_round))
    return _Reply(re.compile(reply.pattern), tuple(answers))
