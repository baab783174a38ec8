"""Encodes text records with a model's tokenizer and chat template, and marks the model's own
tokens.

A conversation is rendered once and cut at the start of each answer, and the parts are tokenised
separately. An answer is then tokenised as in generation, after the end of its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from paceline.errors import ConfigError, InvalidInput
from paceline.services.drafter_trainer.offline.data import Example


class ModelText:
    """Tokenizer and chat template of a model directory. Raises ConfigError if they are missing."""

    def __init__(self, directory: Path, eos_token_ids: Sequence[int]) -> None:
        """`eos_token_ids`: end tokens of the model; a completion's answer ends with the
        first id.
        """
        from transformers import AutoTokenizer  # seconds of import, needed for text alone

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"no tokenizer can be loaded from {directory}: {reason}",
                allowed='records with "input_ids"',
            ) from error
        self._eos = tuple(eos_token_ids)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Example:
        """Encodes a conversation. An answer is marked if the template renders its beginning
        independently of later messages; the last answer always must.

        Raises InvalidInput if no answer can be marked.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if messages[-1]["role"] != "assistant":
            whole = self._render(messages, answer=True)
            answers = []
        else:
            whole = self._render(messages)

        parts, done = list[tuple[str, bool]](), 0
        for i in answers:
            before, after = self._render(messages[:i], answer=True), self._render(messages[: i + 1])
            if whole.startswith(after) and after.startswith(before) and len(before) >= done:
                parts += [
                    (whole[done : len(before)], False),
                    (whole[len(before) : len(after)], True),
                ]
                done = len(after)

        if answers and not parts:
            raise InvalidInput(
                "the chat template does not begin an answer as it ends a prompt", seen=whole[-80:]
            )

        parts.append((whole[done:], False))
        return self._join([(self._encode(text), said) for text, said in parts])

    def completion(self, prompt: str, response: str | None) -> Example:
        """Encodes a prompt as the start of a text; the answer ends with the model's end token."""
        begun = self._tokenizer(prompt, add_special_tokens=True)["input_ids"]
        # Some tokenizers append an end token to every text.
        while len(begun) > 1 and begun[-1] in self._eos:
            begun = begun[:-1]
        said = [] if response is None else [*self._encode(response), *self._eos[:1]]
        return self._join([(begun, False), (said, True)])

    def _render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = False) -> str:
        try:
            plain = [dict(message) for message in messages]
            return str(
                self._tokenizer.apply_chat_template(
                    plain, tokenize=False, add_generation_prompt=answer
                )
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise InvalidInput(f"the chat template refused the messages: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _join(self, parts: Sequence[tuple[list[int], bool]]) -> Example:
        ids, mask = list[int](), list[bool]()
        for part, said in parts:
            ids += part
            # Text of the template after the end token was never generated.
            end = next((i + 1 for i, token in enumerate(part) if token in self._eos), len(part))
            mask += [said and i < end for i in range(len(part))]
        return Example(np.array(ids, dtype=np.int64), np.array(mask, dtype=bool))
