"""The gateway's answers as typed values, read from JSON. A field that is missing or of another kind
raises DataLoss. `raw` is always the received JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from paceline.errors import DataLoss, InvalidInput

State = Literal["open", "final", "unscored", "aborted", "failed"]
Json = dict[str, Any]
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, reused from the cache

    @classmethod
    def read(cls, data: Any) -> Usage:
        """Zeros for absent counts."""
        if not isinstance(data, dict):
            return cls()
        details = data.get("prompt_tokens_details") or {}
        return cls(
            need(data, "prompt_tokens", int),
            need(data, "completion_tokens", int),
            int(details.get("cached_tokens", 0)),
        )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's call of a tool."""

    id: str
    name: str
    arguments: str  # JSON text as the model wrote it

    def parsed(self) -> Json:
        """The arguments as an object. Raises InvalidInput when the model wrote anything else."""
        try:
            value = json.loads(self.arguments or "{}")
        except ValueError as error:
            raise InvalidInput(
                "arguments of a tool call are not JSON", seen=repr(self.arguments[:200])
            ) from error
        if not isinstance(value, dict):
            raise InvalidInput(
                "arguments of a tool call are not an object", seen=repr(self.arguments[:200])
            )
        return value

    @classmethod
    def read(cls, data: Json) -> ToolCall:
        """From OpenAI's form."""
        function = need(data, "function", dict)
        return cls(
            str(data.get("id") or ""),
            need(function, "name", str),
            str(function.get("arguments") or ""),
        )


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One assistant message.

    Append `message` to the conversation unchanged: the gateway then finds its tokens again.
    """

    completion_id: str
    text: str
    message: Json
    finish_reason: str  # "stop", "length", "tool_calls"
    usage: Usage
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""  # the model's reasoning before its content
    token_ids: tuple[int, ...] | None = None  # with return_token_ids
    raw: Json = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, data: Json) -> ChatAnswer:
        """From a chat.completion."""
        choice = only_choice(data)
        message = need(choice, "message", dict)
        return cls(
            completion_id=need(data, "id", str),
            text=text_of(message, "content"),
            message=message,
            finish_reason=str(choice.get("finish_reason") or ""),
            usage=Usage.read(data.get("usage")),
            tool_calls=tuple(ToolCall.read(call) for call in message.get("tool_calls") or ()),
            reasoning=reasoning_of(message),
            token_ids=_ids(choice),
            raw=data,
        )


@dataclass(frozen=True, slots=True)
class Tokens:
    """A completion, token for token."""

    completion_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # behavior log-prob of each token, natural logarithm
    text: str
    finish_reason: str  # "stop", "length"
    usage: Usage
    raw: Json = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, data: Json) -> Tokens:
        """From a completion with token ids and log-probs. Raises DataLoss for an invalid one."""
        choice = only_choice(data)
        tokens = need(choice, "token_ids", list)
        logprobs = need(need(choice, "logprobs", dict), "token_logprobs", list)
        if len(tokens) != len(logprobs):
            raise DataLoss(
                "tokens and log-probs differ in number", seen=len(logprobs), allowed=len(tokens)
            )

        return cls(
            completion_id=need(data, "id", str),
            token_ids=tuple(tokens),
            logprobs=tuple(float(one) for one in logprobs),
            text=need(choice, "text", str),
            finish_reason=str(choice.get("finish_reason") or ""),
            usage=Usage.read(data.get("usage")),
            raw=data,
        )


@dataclass(frozen=True, slots=True)
class Task:
    """A task of a training run that this session attempts."""

    id: str
    prompt: str
    metadata: Mapping[str, str]

    @classmethod
    def read(cls, data: Json) -> Task:
        """From the `task` of a claimed session."""
        return cls(
            need(data, "id", str), need(data, "prompt", str), dict(data.get("metadata") or {})
        )


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """The gateway's record of a session."""

    id: str
    state: State
    task_id: str
    group_id: str
    group_size: int
    sample_index: int
    trainable: bool
    reward: float | None  # None: not scored, which is not 0
    turns: int
    prompt_tokens: int
    completion_tokens: int
    fail_reason: str
    raw: Json = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, data: Json) -> SessionInfo:
        """From a session object; only id and state are required."""
        reward = data.get("reward")
        return cls(
            id=need(data, "id", str),
            state=cast("State", need(data, "state", str)),
            task_id=str(data.get("task_id") or ""),
            group_id=str(data.get("group_id") or ""),
            group_size=int(data.get("group_size") or 1),
            sample_index=int(data.get("sample_index") or 0),
            trainable=bool(data.get("trainable", True)),
            reward=None if reward is None else float(need(data, "reward", (int, float))),
            turns=int(data.get("turns") or 0),
            prompt_tokens=int(data.get("prompt_tokens") or 0),
            completion_tokens=int(data.get("completion_tokens") or 0),
            fail_reason=str(data.get("fail_reason") or ""),
            raw=data,
        )


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A session for its opener; the only answer with the key."""

    id: str
    api_key: str = field(repr=False)
    group_id: str
    task: Task | None

    @classmethod
    def read(cls, data: Json) -> OpenedSession:
        """From the answer to opening or claiming."""
        task = data.get("task")
        return cls(
            id=need(data, "id", str),
            api_key=need(data, "api_key", str),
            group_id=str(data.get("group_id") or ""),
            task=Task.read(need(data, "task", dict)) if task is not None else None,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sample of a session, T tokens."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]  # [T] 1 for a token drawn by the model
    behavior_logprobs: tuple[float, ...]  # [T] 0.0 for other tokens
    version_spans: tuple[Any, ...]  # policy versions of the tokens, in the gateway's form
    reward: float | None

    @classmethod
    def read(cls, data: Json) -> Sample:
        """From one entry of `samples`."""
        reward = data.get("reward")
        return cls(
            token_ids=tuple(need(data, "token_ids", list)),
            loss_mask=tuple(need(data, "loss_mask", list)),
            behavior_logprobs=tuple(need(data, "behavior_logprobs", list)),
            version_spans=tuple(data.get("version_spans") or ()),
            reward=None if reward is None else float(reward),
        )


@contextmanager
def documented_shape() -> Iterator[None]:
    """Wraps the reading of an answer: a shape that differs from docs/agents.md raises DataLoss."""
    try:
        yield
    except (AttributeError, TypeError, ValueError, LookupError, OverflowError) as error:
        raise DataLoss(
            "the answer has another shape than documented", seen=repr(error)[:200]
        ) from error


def need(data: Json, name: str, kind: type[K] | tuple[type[K], ...]) -> K:
    """A field of this kind. Raises DataLoss."""
    value = data.get(name)
    if not isinstance(value, kind):
        kinds = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise DataLoss(
            f"the answer's field {name} is missing or of another kind",
            seen=repr(value)[:100],
            allowed=kinds,
        )
    return value


def text_of(data: Json, name: str) -> str:
    """A text that may be absent or null. Raises DataLoss for anything else."""
    return "" if data.get(name) is None else need(data, name, str)


def only_choice(data: Json) -> Json:
    """The requested choice. Raises DataLoss."""
    choices = need(data, "choices", list)
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise DataLoss("the answer does not hold one choice", seen=len(choices), allowed=1)
    return cast("Json", choices[0])


def reasoning_of(message: Json) -> str:
    """The model's reasoning, under either of the usual names."""
    return text_of(message, "reasoning_content") or text_of(message, "reasoning")


def _ids(choice: Json) -> tuple[int, ...] | None:
    tokens = choice.get("token_ids")
    return tuple(tokens) if isinstance(tokens, list) else None
