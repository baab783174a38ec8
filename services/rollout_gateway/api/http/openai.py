"""Writes completions, chat completions and their log-probs in OpenAI's format, whole and
streamed."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, TypeVar

import orjson
from starlette.requests import Request

from paceline.errors import InvalidInput, PacelineError
from paceline.services.rollout_gateway.api.http import answers, openai_schema
from paceline.services.rollout_gateway.calls.call import Call, Piece, Plan
from paceline.services.rollout_gateway.calls.planner import Asked
from paceline.services.rollout_gateway.chat.messages import Delta, joined
from paceline.services.rollout_gateway.chat.text import TextCodec, TextPlaces
from paceline.services.rollout_gateway.sessions.session import Caller
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
        found = []
        for token, logprob, row in zip(tokens, logprobs, rows or repeat(()), strict=False):
            tops = [self._scored(*one) for one in row]
            found.append({**self._scored(token, logprob), "top_logprobs": tops})
        return found

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


MAX_REQUESTS_PER_CALL = 256
_TEXT = "\ufffc"
"""Placeholder for the text of an event."""
_BROKEN = {"abort": "stop", "error": "stop"}
B = TypeVar("B", bound=openai_schema.GenerationBody)


class _Choices(answers.Answers[B]):
    """An answer with several choices."""

    objects = ("", "")  # whole, chunk
    facts_per_choice = False
    """Whether each choice has the facts of its prompt; else the answer has them once."""
    end = b"data: [DONE]\n\n"

    @abstractmethod
    def _message(self, call: Call) -> dict[str, Any]:
        """The content of a whole choice."""

    @abstractmethod
    def _news(self, index: int, piece: Piece, *, first: bool) -> dict[str, Any]:
        """The content of one chunk of a choice."""

    @abstractmethod
    def _logprobs(self, index: int, chunk: pb.TokenChunk) -> dict[str, Any]:
        """The log-probs of the chunk's tokens."""

    def __init__(self, request: Request, body: B, caller: Caller) -> None:
        super().__init__(request, body, caller)
        self._started: set[int] = set()
        self._called: Counter[int] = Counter()  # tool calls of each choice
        self._places: dict[int, TextPlaces] = {}  # of the tokens of each completion
        self._around: dict[int, tuple[bytes, bytes]] = {}  # bytes before and after an event's text
        options = body.stream_options
        self._counted = options is not None and options.continuous_usage_stats
        logprobs = body.wanted_logprobs() is not None
        self._detailed = logprobs or body.return_token_ids or self._counted

    def _asked(self, prompts: int = 1, *, special: bool = True) -> Asked:
        """The request for choices of so many prompts. Raises InvalidInput for too many."""
        if (count := prompts * self.body.n) > MAX_REQUESTS_PER_CALL:
            message = "prompts times n is too many"
            raise InvalidInput(message, seen=count, allowed=MAX_REQUESTS_PER_CALL)
        return replace(super()._asked(), count=self.body.n, special=special)

    def whole(self, calls: Sequence[Call]) -> dict[str, Any]:
        choices = []
        for index, call in enumerate(calls):
            piece = Piece(call.whole, "", finish=call.finish)
            choices.append(self._choice(index, call, piece, self._message(call)))
        head = self._head(chunk=False) | self._shared_facts(calls[0])
        return {**head, "choices": choices, "usage": self._usage(calls, self.body.n)}

    def piece(self, index: int, call: Call, piece: Piece) -> list[answers.Event]:
        first = index not in self._started
        event: answers.Event = self._head(chunk=True)
        if first:
            event |= self._shared_facts(call) if not self._started else {}
            self._started.add(index)
        news = self._news(index, piece, first=first)
        event["choices"] = [self._choice(index, call, piece, news, first=first)]
        if self._counted:
            event["usage"] = self._usage([call])
        return [event]

    def encode_piece(self, index: int, call: Call, piece: Piece) -> bytes:
        content = piece.content
        if content is None or self._detailed or index not in self._started:
            return super().encode_piece(index, call, piece)
        if index not in self._around:
            # Such events of a choice differ only in their text, so the rest is encoded once.
            one = answers.framed(self.piece(index, call, Piece(piece.chunk, _TEXT)))
            before, _, after = one.rpartition(orjson.dumps(_TEXT))
            self._around[index] = before, after
        before, after = self._around[index]
        return before + orjson.dumps(content) + after

    def last(self, calls: Sequence[Call]) -> Iterator[answers.Event]:
        options = self.body.stream_options
        if options is not None and options.include_usage:
            usage = self._usage(calls, self.body.n)
            yield {**self._head(chunk=True), "choices": [], "usage": usage}

    def failed(self, error: PacelineError) -> answers.Event:
        return answers.openai_error(error)

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        about = {"created": self._created, "model": self._gateway.model}
        return {"id": self.id, "object": self.objects[chunk], **about}

    def _choice(
        self, index: int, call: Call, piece: Piece, content: dict[str, Any], *, first: bool = True
    ) -> dict[str, Any]:
        """A choice, or a chunk of it; first: it is the choice's first chunk."""
        choice: dict[str, Any] = {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": _BROKEN.get(piece.finish, piece.finish) or None,
        }
        if self.body.wanted_logprobs() is not None:
            choice["logprobs"] = self._logprobs(index, piece.chunk)
        if self.body.return_token_ids:
            choice["token_ids"] = list(piece.chunk.token_ids)
        if first and self.facts_per_choice:
            choice |= self._prompt_facts(call)
        if piece.finish:
            choice["stop_reason"] = call.stopped_by
        return choice

    @property
    def _names(self) -> TokenLabels:
        return TokenLabels(self._gateway.codec, self.body.return_tokens_as_token_ids)

    def _shared_facts(self, call: Call) -> dict[str, Any]:
        return {} if self.facts_per_choice else self._prompt_facts(call)

    def _prompt_facts(self, call: Call) -> dict[str, Any]:
        """prompt_token_ids and prompt_logprobs, as far as requested."""
        facts: dict[str, Any] = {}
        if self.body.return_token_ids:
            facts["prompt_token_ids"] = list(call.plan.prompt)
        if (count := self.body.prompt_logprobs) is not None:
            pairs = zip(call.plan.prompt[1:], call.whole.prompt_scores, strict=True)
            scores = [self._prompt_score(token, score, count) for token, score in pairs]
            facts["prompt_logprobs"] = [None, *scores]
        return facts

    def _prompt_score(self, token: int, score: pb.PromptScore, count: int) -> dict[str, Any]:
        """By token id as text: the token itself and the `count` most likely tokens."""
        top = zip(score.top.token_ids[:count], score.top.logprobs, strict=False)
        ranked = {one: (value, rank) for rank, (one, value) in enumerate(top, 1)}
        ranked.setdefault(token, (score.logprob, score.rank))
        decode = self._gateway.codec.token_text
        found = {}
        for one, (value, rank) in ranked.items():
            found[str(one)] = {"logprob": value, "rank": rank, "decoded_token": decode(one)}
        return found

    def _usage(self, calls: Sequence[Call], siblings: int = 1) -> dict[str, Any]:
        prompt, cached, output, reasoning = answers.usage(calls, siblings)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }


class CompletionAnswers(_Choices[openai_schema.CompletionBody]):
    """The answer `text_completion`. With `echo` a choice begins with its prompt."""

    body_type = openai_schema.CompletionBody
    prefix = "cmpl-"
    objects = ("text_completion", "text_completion")
    facts_per_choice = True

    async def plans(self) -> list[Plan]:
        prompts = self.body.prompts()
        asked = self._asked(len(prompts), special=self.body.add_special_tokens)
        return await self._gateway.planner.completions(asked, prompts)

    def _message(self, call: Call) -> dict[str, Any]:
        return {"text": call.text}

    def _news(self, index: int, piece: Piece, *, first: bool) -> dict[str, Any]:
        return {"text": piece.text}

    def _choice(
        self, index: int, call: Call, piece: Piece, content: dict[str, Any], *, first: bool = True
    ) -> dict[str, Any]:
        prompt = self._echo(index) if self.body.echo and first else ""
        if first:
            content = {"text": prompt + content["text"]}
            if self.body.logprobs is not None:
                self._places[index] = self._gateway.codec.places(len(prompt))
        choice = super()._choice(index, call, piece, content, first=first)
        if self.body.echo and first and choice["logprobs"] is not None:
            choice["logprobs"] = _behind(self._prompt_logprobs(call, prompt), choice["logprobs"])
        return choice

    def _echo(self, index: int) -> str:
        """The prompt of a choice as text: the given text, or the decoded tokens."""
        given = self.body.prompts()[index // self.body.n]
        return given if isinstance(given, str) else self._gateway.codec.decode_all(given)

    def _prompt_logprobs(self, call: Call, text: str) -> dict[str, Any]:
        tokens, scores = call.plan.prompt, call.whole.prompt_scores
        rows = rows_of((score.top for score in scores), self.body.logprobs)
        logprobs = [None, *(score.logprob for score in scores)]
        found = self._spelled(tokens, logprobs, [(), *rows])
        if found["top_logprobs"] is not None:
            found["top_logprobs"][0] = None
        return {**found, "text_offset": self._gateway.codec.places_in(text, tokens)}

    def _logprobs(self, index: int, chunk: pb.TokenChunk) -> dict[str, Any]:
        tokens = chunk.token_ids
        found = self._spelled(tokens, list(chunk.behavior_logprobs), rows_of(chunk.top_logprobs))
        return {**found, "text_offset": self._places[index].take(tokens)}

    def _spelled(
        self, tokens: Sequence[int], logprobs: Sequence[float | None], rows: Sequence[Row]
    ) -> dict[str, Any]:
        """Log-probs without offsets; with alternatives both by name, as OpenAI does, and as a
        list.
        """
        names, wanted = self._names, bool(self.body.logprobs)
        tops = [names.keyed(token, row) for token, row in zip(tokens, rows, strict=False)]
        spelled, top = [names.name(token) for token in tokens], tops if wanted and tops else None
        found = {"tokens": spelled, "token_logprobs": logprobs, "top_logprobs": top}
        if wanted:
            found["content"] = names.listed(tokens, logprobs, rows)
        return found


class ChatAnswers(_Choices[openai_schema.ChatBody]):
    """The answer `chat.completion` and its chunks."""

    body_type = openai_schema.ChatBody
    prefix = "chatcmpl-"
    objects = ("chat.completion", "chat.completion.chunk")

    async def plans(self) -> list[Plan]:
        return await self._chat(self.body.request)

    def _message(self, call: Call) -> dict[str, Any]:
        """With reasoning_content as in DeepSeek and vLLM."""
        message = joined(call.deltas)
        body = message.shown()
        if message.tool_calls:
            body["content"] = message.content or None
        return {"message": body}

    def _news(self, index: int, piece: Piece, *, first: bool) -> dict[str, Any]:
        news: dict[str, Any] = {"role": "assistant"} if first else {}
        delta = piece.delta or Delta(piece.text)
        if delta.reasoning:
            news["reasoning_content"] = delta.reasoning
        if delta.content or not (delta.reasoning or delta.tool_calls):
            news["content"] = delta.content
        if delta.tool_calls:
            numbered = enumerate(delta.tool_calls, self._called[index])
            news["tool_calls"] = [{"index": number, **call.shown()} for number, call in numbered]
            self._called[index] += len(delta.tool_calls)
        return {"delta": news}

    def _logprobs(self, index: int, chunk: pb.TokenChunk) -> dict[str, Any]:
        rows = rows_of(chunk.top_logprobs)
        return {"content": self._names.listed(chunk.token_ids, chunk.behavior_logprobs, rows)}


def _behind(prompt: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Join the log-probs of a prompt and of the tokens after it."""
    both = {name: prompt[name] + (later[name] or []) for name in prompt if prompt[name] is not None}
    return {**later, **both}
