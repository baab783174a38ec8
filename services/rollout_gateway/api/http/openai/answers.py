"""Writes completions and chat completions as OpenAI's JSON, whole and streamed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from paceline.errors import InvalidInput, PacelineError
from paceline.v1 import engine_pb2 as pb
from rollout_gateway.api.http.answers import Answers, Event, usage
from rollout_gateway.api.http.errors import openai_error
from rollout_gateway.api.http.openai.schema import ChatBody, CompletionBody, GenerationBody
from rollout_gateway.calls.call import Call, Piece, Plan
from rollout_gateway.chat.messages import Delta, Message, ToolCallDelta, joined
from rollout_gateway.sessions.session import Caller

MAX_REQUESTS_PER_CALL = 256
_BROKEN = {"abort": "stop", "error": "stop"}
B = TypeVar("B", bound=GenerationBody)


class _Choices(Answers[B]):
    """An answer of several choices."""

    objects = ("", "")  # whole, chunk
    end = b"data: [DONE]\n\n"

    @abstractmethod
    def _said(self, call: Call) -> dict[str, Any]: ...

    @abstractmethod
    def _news(self, index: int, piece: Piece) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, chunk: pb.TokenChunk, start: int) -> dict[str, Any]: ...

    def whole(self, calls: Sequence[Call]) -> dict[str, Any]:
        choices = [
            self._choice(index, call.whole, self._said(call), call.finish)
            for index, call in enumerate(calls)
        ]
        return {**self._head(chunk=False), "choices": choices, "usage": self._usage(calls)}

    def piece(self, index: int, call: Call, piece: Piece) -> Iterator[Event]:
        news = self._news(index, piece)
        choice = self._choice(index, piece.chunk, news, piece.finish, piece.start)
        yield {**self._head(chunk=True), "choices": [choice]}

    def last(self, calls: Sequence[Call]) -> Iterator[Event]:
        if self.body.with_usage():
            yield {**self._head(chunk=True), "choices": [], "usage": self._usage(calls)}

    def failed(self, error: PacelineError) -> Event:
        return openai_error(error)

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.objects[chunk],
            "created": self._created,
            "model": self._gateway.model,
        }

    def _choice(
        self, index: int, chunk: pb.TokenChunk, said: dict[str, Any], finish: str, start: int = 0
    ) -> dict[str, Any]:
        finish_reason = _BROKEN.get(finish, finish) or None
        choice = {"index": index, **said, "logprobs": None, "finish_reason": finish_reason}
        if self.body.wanted_logprobs() is not None:
            choice["logprobs"] = self._logprobs(chunk, start)
        if self.body.return_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        return choice

    def _text(self, token: int) -> str:
        return self._gateway.codec.token_text(token)

    def _alternatives(self, chunk: pb.TokenChunk) -> list[list[tuple[str, float]]]:
        """Most likely tokens by position."""
        return [
            [
                (self._text(one), value)
                for one, value in zip(row.token_ids, row.logprobs, strict=True)
            ]
            for row in chunk.top_logprobs
        ]

    def _usage(self, calls: Sequence[Call]) -> dict[str, Any]:
        counted = usage(calls, self.body.n)
        return {
            "prompt_tokens": counted.prompt,
            "completion_tokens": counted.said,
            "total_tokens": counted.prompt + counted.said,
            "prompt_tokens_details": {"cached_tokens": counted.cached},
            "completion_tokens_details": {"reasoning_tokens": counted.thought},
        }


class CompletionAnswers(_Choices[CompletionBody]):
    """`text_completion`."""

    prefix = "cmpl-"
    objects = ("text_completion", "text_completion")

    async def plans(self) -> list[Plan]:
        self.body.check()
        prompts = self.body.prompts()
        refuse_above(len(prompts) * self.body.n)
        return await self._gateway.planner.completions(self._asked(self.body.n), prompts)

    def _said(self, call: Call) -> dict[str, Any]:
        return {"text": call.text}

    def _news(self, index: int, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text}

    def _logprobs(self, chunk: pb.TokenChunk, start: int) -> dict[str, Any]:
        tokens = [self._text(token) for token in chunk.token_ids]
        offsets = [start + sum(map(len, tokens[:index])) for index in range(len(tokens))]
        return {
            "tokens": tokens,
            "token_logprobs": list(chunk.behavior_logprobs),
            "top_logprobs": [dict(row) for row in self._alternatives(chunk)] or None,
            "text_offset": offsets,
        }


class ChatAnswers(_Choices[ChatBody]):
    """`chat.completion` and its chunks."""

    prefix = "chatcmpl-"
    objects = ("chat.completion", "chat.completion.chunk")

    def __init__(self, request: Request, body: ChatBody, caller: Caller) -> None:
        super().__init__(request, body, caller)
        self._started: set[int] = set()

    async def plans(self) -> list[Plan]:
        refuse_above(self.body.n)
        return await self._chat(self.body.request, self.body.n)

    def _said(self, call: Call) -> dict[str, Any]:
        return {"message": shown(joined(call.deltas))}

    def _news(self, index: int, piece: Piece) -> dict[str, Any]:
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
        return {"delta": news}

    def _logprobs(self, chunk: pb.TokenChunk, start: int) -> dict[str, Any]:
        alternatives = self._alternatives(chunk) or [[] for _ in chunk.token_ids]
        return {
            "content": [
                {
                    **_scored(self._text(token), logprob),
                    "top_logprobs": [_scored(text, other) for text, other in row],
                }
                for token, logprob, row in zip(
                    chunk.token_ids, chunk.behavior_logprobs, alternatives, strict=True
                )
            ]
        }


def refuse_above(count: int) -> None:
    """Raises InvalidInput for more generations in one call than are served."""
    if count > MAX_REQUESTS_PER_CALL:
        raise InvalidInput("prompts times n is too many", seen=count, allowed=MAX_REQUESTS_PER_CALL)


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
