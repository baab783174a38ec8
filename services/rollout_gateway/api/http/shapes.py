"""Shared parts of several APIs' bodies: unions with precise errors, JSON values, text parts.

A union of plain types would try every branch and report the errors of all branches. These unions
choose a branch by a look at the value, so that an error refers to the intended branch. Tags are no
identifiers: error paths leave them out.
"""

import math
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic.functional_validators import AfterValidator, model_validator
from pydantic_core import PydanticCustomError

from paceline import config
from paceline.services.rollout_gateway.api.http import beyond
from paceline.services.rollout_gateway.chat import messages as chat
from paceline.services.rollout_gateway.engines.sampling import MAX_STOPS, RANGES, Sampling
from paceline.v1 import trajectory_pb2 as tpb

_STRUCTURED = {"json_schema", "regex", "choice", "grammar", "tool_grammar", "free_until"}
_SPELLED_APART = {"seed", "max_tokens", "stop", "top_logprobs", "prompt_logprobs"} | _STRUCTURED
_PLAIN = {field.name for field in fields(Sampling)} - _SPELLED_APART
"""Sampling parameters with the same name in bodies and in Sampling."""
MAX_MESSAGES, MAX_TOOLS = 4096, 1024
"""Maximum messages and tools of a conversation."""
MAX_ARGUMENTS = 256 << 10
"""Maximum characters of a tool call's arguments, which are parsed and written again as JSON."""
MAX_JSON_DEPTH = 64
"""Maximum nesting of objects and arrays in values that reach templates and clients."""


def _publish(schema: dict[str, Any], kind: type[Any]) -> None:
    """Publish a shape with its fields and its API's harmless fields; other fields may only be
    empty.
    """
    schema["additionalProperties"] = {"enum": [*beyond.NOTHING]}
    properties, required = schema["properties"], schema.get("required", ())
    for name in properties.keys() - required:
        properties[name] = {"anyOf": [properties[name], {"type": "null"}]}
    table = kind.undeclared
    for name in filter(str.isidentifier, table.harmless - table.neutral.keys()):
        properties.setdefault(name, {"description": "Accepted and ignored."})


class Shape(BaseModel):
    """An object of a body. It keeps undeclared fields until `undeclared` has judged them."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra=_publish)
    undeclared: ClassVar[beyond.Beyond] = beyond.Beyond()
    """Accepted undeclared fields of a body."""
    null_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields in which null differs from the default."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Null requests nothing: clients send it for fields that their users left open."""
        if not isinstance(value, dict):
            return value
        kept = cls.null_fields
        return {name: one for name, one in value.items() if one is not None or name in kept}


def by_type(default: str = "") -> Discriminator:
    """Chooses the branch tagged `<type>` by the value's field `type`; `default` without that
    field.
    """

    def tag(value: Any) -> str:
        read = value.get if isinstance(value, dict) else partial(getattr, value)
        return f"<{read('type', default)}>"

    error = "a type that is not served"
    return Discriminator(tag, custom_error_type="unknown_type", custom_error_message=error)


def _plain(value: Any, depth: int = 0) -> Any:
    if depth > MAX_JSON_DEPTH:
        message = "more than {most} objects and arrays inside each other"
        raise PydanticCustomError("json_depth", message, {"most": MAX_JSON_DEPTH})
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("json_number", "NaN and Infinity are no JSON")
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _plain(one, depth + 1)
    return value


T = TypeVar("T")
_BY_TEXT = Discriminator(lambda value: "<text>" if isinstance(value, str) else "<other>")
TextOr = Annotated[Annotated[str, Tag("<text>")] | Annotated[T, Tag("<other>")], _BY_TEXT]
"""A text, or another type."""
ChoiceOr = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<text>")] | Annotated[T, Tag("<other>")],
    _BY_TEXT,
]
"""OpenAI's tool_choice: a mode, or the shape of a named tool."""
Several = Annotated[list[T], Field(fail_fast=True)]
"""A list that reports only its first wrong item: finding all wrong items takes long."""
Arguments = Annotated[str, Field(max_length=MAX_ARGUMENTS)]
"""A tool call's arguments as JSON text."""
JsonValue = Annotated[Any, AfterValidator(_plain)]
"""Any JSON value that can be written again."""
JsonObject = Annotated[dict[str, Any], AfterValidator(_plain)]
"""A JSON object that can be written again."""


class TextPart(Shape):
    """A text part of a content; a model's refusal counts as text."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


Content = TextOr[Several[TextPart]]
"""Text, or parts of text."""


def within(name: str, *, whole: bool = False) -> Any:
    """The range of a sampling parameter as a pydantic field."""
    allowed = RANGES[name]
    least = 0 if allowed.or_zero else allowed.low
    above, from_on = (least, None) if allowed.above else (None, least)
    return Field(gt=above, ge=from_on, le=allowed.high, allow_inf_nan=None if whole else False)


TopP = Annotated[float, within("top_p")]
Limit = Annotated[int, within("max_tokens", whole=True)]
TopK = Annotated[
    int, Field(ge=-1, le=RANGES["top_k"].high), AfterValidator(lambda count: max(count, 0))
]
"""-1 disables top_k, as 0 does."""
TopLogprobs = Annotated[int, within("top_logprobs", whole=True)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Stop = TextOr[Annotated[list[str], Field(max_length=MAX_STOPS)]]
"""One or several texts that end the answer."""


def joined_text(content: str | list[Any] | None) -> str:
    """The parts' texts, joined without a separator."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


class SampledBody(Shape):
    """The body of a request that generates."""

    model: str | None = None
    stream: bool = False
    temperature: config.Temperature = 1.0
    top_p: TopP = 1.0
    seed: Seed | None = None
    max_tokens: Limit | None = None
    stop: Stop | None = None

    def limit(self) -> int | None:
        """Maximum tokens to generate; None: as many as fit."""
        return self.max_tokens

    def structure(self) -> dict[str, Any]:
        """Constraints on the answer, as parameters of Sampling."""
        return {}

    def wanted_logprobs(self) -> int | None:
        """Alternatives per token; None without requested log-probs."""
        return None

    def wanted_prompt_logprobs(self) -> int | None:
        """Alternatives per prompt token; None without requested prompt log-probs."""
        return None

    def check(self) -> None:
        """Raises FieldError for fields that exclude each other or are not served."""

    def unheeded(self) -> Sequence[str]:
        """Fields that have no effect because no grammar constrains the calls of tools."""
        return ()

    def sampling(self, room: int) -> tpb.SamplingParams:
        """The sampling of the first choice with `room` tokens left."""
        known = type(self).model_fields.keys() & _PLAIN
        limit = self.limit()
        return tpb.SamplingParams(
            **{name: value for name in known if (value := getattr(self, name)) is not None},
            max_tokens=room if limit is None else limit,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            top_logprobs=self.wanted_logprobs() or 0,
            **self.structure(),
            prompt_logprobs=self.wanted_prompt_logprobs(),
            seed=self.seed,
        )


class FunctionShape(Shape):
    """A function that the model may call."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None  # arguments match the parameters; templates do not get it

    def shown(self) -> dict[str, Any]:
        """The form for chat templates, which every API also hashes."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        given = {key: value for key, value in about.items() if value is not None}
        return {"type": "function", "function": given}


class ToolsShape(Shape):
    """A conversation with tools."""

    strict_field: ClassVar[str] = "tools[].strict"
    one_call_field: ClassVar[str] = "parallel_tool_calls"
    """Paths of the fields that have an effect only with a grammar."""

    @property
    def one_call(self) -> bool:
        """Whether a message may have only one call."""
        return not getattr(self, "parallel_tool_calls", True)

    def functions(self) -> Sequence[FunctionShape]:
        """The offered functions."""
        return list(getattr(self, "tools", None) or ())

    def unheeded(self) -> Sequence[str]:
        """Fields that have no effect because no grammar constrains the calls of tools."""
        offered = self.functions()
        strict = [self.strict_field] if any(tool.strict for tool in offered) else []
        return [*strict, *([self.one_call_field] if offered and self.one_call else [])]

    def chat_request(
        self, said: Sequence[chat.Message], choice: chat.ToolChoice, prefill: str = ""
    ) -> chat.ChatRequest:
        """The conversation of these messages with the offered tools."""
        offered = self.functions()
        tools = tuple(tool.shown() for tool in offered)
        strict = frozenset(tool.name for tool in offered if tool.strict)
        return chat.ChatRequest(tuple(said), tools, choice, prefill, strict, self.one_call)


def tool_choice(choice: Any) -> chat.ToolChoice:
    """The gateway's ToolChoice of a mode or of a shape with the name of a tool; None: auto."""
    named = isinstance(choice, Shape)
    return chat.ToolChoice("named", choice.name) if named else chat.ToolChoice(choice or "auto")
