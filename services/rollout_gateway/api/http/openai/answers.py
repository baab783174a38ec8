"""Writes completions and chat completions as OpenAI's JSON, whole and streamed."""

from __future__ import annotations

import time
from typing import Any

from paceline.errors import PacelineError
from paceline.v1 import engine_pb2 as pb
from rollout_gateway.api.http.errors import openai_error
from rollout_gateway.api.http.openai.schema import ChatBody, GenerationBody
from rollout_gateway.api.http.streaming import AnswerChoice, Event
from rollout_gateway.calls.call import Piece
from rollout_gateway.chat.messages import Delta, Message, ToolCallDelta
from rollout_gateway.chat.text import TextCodec

FINISH = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "abort": "stop",
    "error": "stop",
}


class _Base:
    """Facts that all chunks of an answer share."""

    objects = ("", "")  # whole, chunk

    def __init__(
        self, model: str, codec: TextCodec, body: GenerationBody, completion_id: str
    ) -> None:
        self._codec = codec
        self._body = body
        self._id = completion_id
        self._created = int(time.time())
        self._model = model

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": self.objects[chunk],
            "created": self._created,
            "model": self._model,
        }

    end = "data: [DONE]\n\n"

    def first(self) -> list[Event]:
        return []

    def failed(self, error: PacelineError) -> list[Event]:
        return [("", openai_error(error))]

    def _choice(
        self, index: int, chunk: pb.TokenChunk, content: dict[str, Any], offset: int, finish: str
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": FINISH.get(finish)}
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
            [
                (token(one), logprob)
                for one, logprob in zip(row.token_ids, row.logprobs, strict=True)
            ]
            for row in chunk.top_logprobs
        ]

    @staticmethod
    def _usage(choices: list[AnswerChoice], siblings: int) -> dict[str, Any]:
        """Tokens; a prompt shared by `siblings` choices counts once."""
        prompt = sum(choice.prompt_tokens for choice in choices) // siblings
        completion = sum(len(choice.whole.token_ids) for choice in choices)
        cached = sum(choice.whole.cached_prompt_tokens for choice in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)
            },
        }


class CompletionAnswers(_Base):
    """`text_completion`."""

    objects = ("text_completion", "text_completion")

    def whole(self, choices: list[AnswerChoice]) -> dict[str, Any]:
        listed = [
            self._choice(i, one.whole, {"text": one.text}, 0, one.finish)
            for i, one in enumerate(choices)
        ]
        return {
            **self._head(chunk=False),
            "choices": listed,
            "usage": self._usage(choices, self._body.n),
        }

    def piece(self, index: int, choice: AnswerChoice, piece: Piece) -> list[Event]:
        offset = len(choice.text) - len(piece.text)
        said = self._choice(index, piece.chunk, {"text": piece.text}, offset, piece.finish)
        return [("", {**self._head(chunk=True), "choices": [said]})]

    def last(self, choices: list[AnswerChoice]) -> list[Event]:
        if not self._body.with_usage():
            return []
        return [
            (
                "",
                {
                    **self._head(chunk=True),
                    "choices": [],
                    "usage": self._usage(choices, self._body.n),
                },
            )
        ]

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

    objects = ("chat.completion", "chat.completion.chunk")

    def __init__(self, model: str, codec: TextCodec, body: ChatBody, completion_id: str) -> None:
        super().__init__(model, codec, body, completion_id)
        self._started: set[int] = set()

    def whole(self, choices: list[AnswerChoice]) -> dict[str, Any]:
        listed = [
            self._choice(index, one.whole, {"message": shown(one.message)}, 0, one.finish)
            for index, one in enumerate(choices)
        ]
        return {
            **self._head(chunk=False),
            "choices": listed,
            "usage": self._usage(choices, self._body.n),
        }

    def piece(self, index: int, choice: AnswerChoice, piece: Piece) -> list[Event]:
        news: dict[str, Any] = {}
        if index not in self._started:
            self._started.add(index)
            news["role"] = "assistant"
        delta = piece.delta or Delta(piece.text)
        if delta.reasoning:
            news["reasoning_content"] = delta.reasoning
        if delta.content or not (delta.reasoning or delta.tool_calls):
            news["content"] = delta.content
        if delta.tool_calls:
            news["tool_calls"] = [_call_news(call) for call in delta.tool_calls]
        said = self._choice(index, piece.chunk, {"delta": news}, 0, piece.finish)
        return [("", {**self._head(chunk=True), "choices": [said]})]

    def last(self, choices: list[AnswerChoice]) -> list[Event]:
        if not self._body.with_usage():
            return []
        return [
            (
                "",
                {
                    **self._head(chunk=True),
                    "choices": [],
                    "usage": self._usage(choices, self._body.n),
                },
            )
        ]

    def _logprobs(self, chunk: pb.TokenChunk, offset: int) -> dict[str, Any]:
        alternatives = self._alternatives(chunk) or [[] for _ in chunk.token_ids]
        return {
            "content": [
                {
                    **_scored(self._codec.token_text(token), logprob),
                    "top_logprobs": [_scored(text, other) for text, other in row],
                }
                for token, logprob, row in zip(
                    chunk.token_ids, chunk.behavior_logprobs, alternatives, strict=True
                )
            ]
        }


def _scored(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def shown(message: Message) -> dict[str, Any]:
    """A message as OpenAI's chat completions spell it; reasoning_content as DeepSeek and vLLM
    do.
    """
    body = message.shown()
    if message.tool_calls:
        body["content"] = message.content or None
    return body


def _call_news(call: ToolCallDelta) -> dict[str, Any]:
    news: dict[str, Any] = {"index": call.index, "function": {"arguments": call.arguments}}
    if call.call_id:
        news["id"], news["type"] = call.call_id, "function"
    if call.name:
        news["function"]["name"] = call.name
    return news
