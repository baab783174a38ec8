"""Answers in OpenAI's shapes. Owns the JSON of completions and chat completions, whole and streamed."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.v1 import engine_pb2 as pb
from paceline.v1 import trajectory_pb2 as tpb
from rollout_gateway.gateway import Piece
from rollout_gateway.http_schema import ChatBody, CompletionBody, GenerationBody
from rollout_gateway.text import TextCodec

FINISH = {
    tpb.FINISH_REASON_STOP: "stop",
    tpb.FINISH_REASON_LENGTH: "length",
    tpb.FINISH_REASON_ABORT: "abort",
    tpb.FINISH_REASON_ERROR: "error",
}


@dataclass
class Choice:
    """One completion so far."""

    prompt_tokens: int
    text: str = ""
    whole: pb.TokenChunk = field(default_factory=pb.TokenChunk)

    @property
    def finish_reason(self) -> tpb.FinishReason:
        return self.whole.finish_reason

    @property
    def error(self) -> str:
        """Why the engine failed, if it did."""
        return self.whole.error

    def add(self, piece: Piece) -> None:
        """Take news."""
        self.text += piece.text
        self.whole.MergeFrom(piece.chunk)


class Answers(Protocol):
    """JSON of one request's answers."""

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        ...

    def piece(self, index: int, choice: Choice, piece: Piece) -> dict[str, Any]:
        """One streamed chunk; `choice` holds it already."""
        ...

    def last(self, choices: list[Choice]) -> dict[str, Any] | None:
        """The streamed chunk after the choices, if there is one."""
        ...


class _Base:
    """Facts that all chunks of an answer share."""

    prefix = ""
    objects = ("", "")  # whole, chunk

    def __init__(self, model: str, codec: TextCodec, body: GenerationBody) -> None:
        self._codec = codec
        self._body = body
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        return {"id": self._id, "object": self.objects[chunk], "created": self._created, "model": self._model}

    def _choice(self, index: int, chunk: pb.TokenChunk, content: dict[str, Any], offset: int) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": FINISH.get(chunk.finish_reason)}
        if self._body.wanted_logprobs() is not None:
            choice["logprobs"] = self._logprobs(chunk, offset)
        if self._body.return_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        return choice

    def _logprobs(self, chunk: pb.TokenChunk, offset: int) -> dict[str, Any]:
        raise AssertionError("each shape has its own")

    def _alternatives(self, chunk: pb.TokenChunk) -> list[list[tuple[str, float]]]:
        """Most likely tokens by position."""
        token = self._codec.token_text
        return [
            [(token(one), logprob) for one, logprob in zip(row.token_ids, row.logprobs, strict=True)]
            for row in chunk.top_logprobs
        ]

    @staticmethod
    def _usage(choices: list[Choice], siblings: int) -> dict[str, Any]:
        """Tokens; a prompt shared by `siblings` choices counts once."""
        prompt = sum(choice.prompt_tokens for choice in choices) // siblings
        completion = sum(len(choice.whole.token_ids) for choice in choices)
        cached = sum(choice.whole.cached_prompt_tokens for choice in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
        }


class CompletionAnswers(_Base):
    """`text_completion`."""

    prefix = "cmpl"
    objects = ("text_completion", "text_completion")

    def __init__(self, model: str, codec: TextCodec, body: CompletionBody) -> None:
        super().__init__(model, codec, body)

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        listed = [self._choice(i, one.whole, {"text": one.text}, 0) for i, one in enumerate(choices)]
        return {**self._head(chunk=False), "choices": listed, "usage": self._usage(choices, self._body.n)}

    def piece(self, index: int, choice: Choice, piece: Piece) -> dict[str, Any]:
        offset = len(choice.text) - len(piece.text)
        return {**self._head(chunk=True), "choices": [self._choice(index, piece.chunk, {"text": piece.text}, offset)]}

    def last(self, choices: list[Choice]) -> dict[str, Any] | None:
        return None

    def _logprobs(self, chunk: pb.TokenChunk, offset: int) -> dict[str, Any]:
        tokens = [self._codec.token_text(token) for token in chunk.token_ids]
        offsets = [offset + sum(map(len, tokens[:index])) for index in range(len(tokens))]
        return {
            "tokens": tokens,
            "token_logprobs": list(chunk.behavior_logprobs),
            "top_logprobs": [dict(row) for row in self._alternatives(chunk)] or None,
            "text_offset": offsets,
        }


class ChatAnswers(_Base):
    """`chat.completion` and its chunks."""

    prefix = "chatcmpl"
    objects = ("chat.completion", "chat.completion.chunk")

    def __init__(self, model: str, codec: TextCodec, body: ChatBody) -> None:
        super().__init__(model, codec, body)
        self._started: set[int] = set()
        self._with_usage = bool((body.stream_options or {}).get("include_usage"))

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        listed = [
            self._choice(index, one.whole, {"message": {"role": "assistant", "content": one.text}}, 0)
            for index, one in enumerate(choices)
        ]
        return {**self._head(chunk=False), "choices": listed, "usage": self._usage(choices, self._body.n)}

    def piece(self, index: int, choice: Choice, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text}
        if index not in self._started:
            self._started.add(index)
            delta = {"role": "assistant", **delta}
        return {**self._head(chunk=True), "choices": [self._choice(index, piece.chunk, {"delta": delta}, 0)]}

    def last(self, choices: list[Choice]) -> dict[str, Any] | None:
        if not self._with_usage:
            return None
        return {**self._head(chunk=True), "choices": [], "usage": self._usage(choices, self._body.n)}

    def _logprobs(self, chunk: pb.TokenChunk, offset: int) -> dict[str, Any]:
        alternatives = self._alternatives(chunk) or [[] for _ in chunk.token_ids]
        return {
            "content": [
                {
                    **_scored(self._codec.token_text(token), logprob),
                    "top_logprobs": [_scored(text, other) for text, other in row],
                }
                for token, logprob, row in zip(chunk.token_ids, chunk.behavior_logprobs, alternatives, strict=True)
            ]
        }


def _scored(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
