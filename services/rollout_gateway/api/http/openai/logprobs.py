"""Formats log-probs of tokens as OpenAI does. Tokens with the same text stay separate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from paceline.services.rollout_gateway.chat.text import TextCodec
from paceline.v1 import engine_pb2 as pb

Row = Sequence[tuple[int, float]]
"""Most likely tokens at a position with their log-probs, the most likely first."""


def rows_of(tops: Iterable[pb.TopLogprobs], count: int | None = None) -> list[Row]:
    """The `count` most likely tokens by position; None: all recorded tokens."""
    return [list(zip(one.token_ids, one.logprobs, strict=True))[:count] for one in tops]


@dataclass(frozen=True, slots=True)
class TokenLabels:
    """Formats the tokens of one answer."""

    codec: TextCodec
    as_ids: bool  # as `token_id:7` instead of text

    def listed(
        self, tokens: Sequence[int], logprobs: Sequence[float | None], rows: Sequence[Row]
    ) -> list[dict[str, Any]]:
        """Tokens by position with their alternatives, in the format of chat completions. rows:
        empty without alternatives.
        """
        return [
            {
                **self._scored(token, logprob),
                "top_logprobs": [self._scored(one, value) for one, value in row],
            }
            for token, logprob, row in zip(tokens, logprobs, rows or repeat(()), strict=False)
        ]

    def name(self, token: int) -> str:
        """A token in the format of completions: its text, or its bytes if they are not valid
        text.
        """
        if self.as_ids:
            return _by_id(token)
        data = self.codec.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + data.decode("ascii", errors="backslashreplace")

    def keyed(self, token: int, row: Row) -> dict[str, float]:
        """Alternatives at the position of a token by name, in the format of completions. A name
        that the token or a likelier alternative already has becomes `token_id:7`.
        """
        owners = {self.name(token): token}
        found: dict[str, float] = {}
        for one, value in row:
            name = self.name(one)
            if owners.setdefault(name, one) != one:
                name = _by_id(one)
            found[name] = value
        return found

    def _scored(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": _by_id(token) if self.as_ids else self.codec.token_text(token),
            "token_id": token,
            "logprob": logprob,
            "bytes": list(self.codec.token_bytes(token)),
        }


def _by_id(token: int) -> str:
    return f"token_id:{token}"
