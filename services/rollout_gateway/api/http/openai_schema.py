"""Bodies of OpenAI's requests: their fields, types and ranges. beyond.py handles further fields."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import Discriminator, Field, Tag

from paceline.services.rollout_gateway.api.http import beyond, shapes
from paceline.services.rollout_gateway.chat import messages as chat
from paceline.services.rollout_gateway.engines import sampling
from paceline.services.rollout_gateway.engines.requests.structures import MAX_CHOICES
from paceline.trajectory import INT_LIMIT


class SchemaBody(shapes.Shape):
    """A schema with a name, as response_format contains it."""

    json_schema: shapes.JsonObject | None = Field(None, alias="schema")


class ResponseFormat(shapes.Shape):
    """The required form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: SchemaBody | None = None

    def schema_text(self) -> str:
        """The schema as JSON text; "{}" is any object, "" no constraint."""
        if self.type == "text":
            return ""
        named = self.json_schema if self.type == "json_schema" else None
        return json.dumps((named and named.json_schema) or {})


class StructuredOutputs(shapes.Shape):
    """The required structure of the answer in vLLM's format: exactly one field is set."""

    json_demand: shapes.TextOr[shapes.JsonObject] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    grammar: str | None = None
    json_object: bool | None = None

    def parameters(self) -> dict[str, Any]:
        """The parameters of Sampling. Raises FieldError unless exactly one field is set."""
        schema = self.json_demand
        asked = [
            ("json_schema", json.dumps(schema) if isinstance(schema, dict) else schema),
            ("json_schema", "{}" if self.json_object else None),
            ("regex", self.regex),
            ("choice", self.choice),
            ("grammar", self.grammar),
        ]
        given = [(name, value) for name, value in asked if value is not None]
        if len(given) != 1 or not given[0][1]:
            message = "holds one demand that is not empty"
            seen = ", ".join(name for name, _ in given) or "none"
            allowed = "json, regex, choice, grammar or json_object"
            raise beyond.FieldError("structured_outputs", message, seen=seen, allowed=allowed)
        return dict(given)


MAX_COMPLETIONS = 128
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
BiasedToken = Annotated[TokenId, Field(strict=False)]
Bias = Annotated[float, Field(ge=sampling.BIAS.low, le=sampling.BIAS.high, allow_inf_nan=False)]


def _prompt_kind(prompt: object) -> str:
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    if isinstance(first, str):
        return "<texts>" if isinstance(prompt, list) else "<text>"
    return "<id lists>" if isinstance(first, list) and first is not prompt else "<ids>"


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[shapes.Several[str], Tag("<texts>")]
    | Annotated[shapes.Several[TokenId], Tag("<ids>")]
    | Annotated[shapes.Several[shapes.Several[TokenId]], Tag("<id lists>")],
    Discriminator(_prompt_kind),
]
"""One or several prompts, each text or token ids."""


class StreamOptions(shapes.Shape):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # of a choice so far, in each of its chunks


class GenerationBody(shapes.SampledBody):
    """Fields of both kinds of completion."""

    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] = 1
    top_k: shapes.TopK = 0
    min_p: Annotated[float, shapes.within("min_p")] = 0.0
    presence_penalty: Annotated[float, shapes.within("presence_penalty")] = 0.0
    frequency_penalty: Annotated[float, shapes.within("frequency_penalty")] = 0.0
    # From here to return_tokens_as_token_ids, fields that OpenAI lacks have vLLM's names.
    repetition_penalty: Annotated[float, shapes.within("repetition_penalty")] = 1.0
    min_tokens: Annotated[int, shapes.within("min_tokens", whole=True)] = 0
    # JSON has the ids as text.
    logit_bias: dict[BiasedToken, Bias] | None = Field(None, max_length=sampling.MAX_BIASED_TOKENS)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=sampling.MAX_STOP_TOKENS)
    include_stop_str_in_output: bool = False
    allowed_token_ids: list[TokenId] | None = Field(
        None, min_length=1, max_length=sampling.MAX_ALLOWED_TOKENS
    )
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: shapes.TopLogprobs | None = None
    ignore_eos: bool = False  # continue after an end token
    return_token_ids: bool = False  # token_ids in each choice, prompt_token_ids
    return_tokens_as_token_ids: bool = False  # log-probs show a token as "token_id:7"

    def wanted_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise beyond.FieldError("stream_options", "needs a stream", seen="stream=false")
        if self.prompt_logprobs is not None and self.stream:
            wrong = "is not served in a stream"
            raise beyond.FieldError("prompt_logprobs", wrong, seen="stream=true")

    def structure(self) -> dict[str, Any]:
        schema = self.response_format.schema_text() if self.response_format is not None else ""
        if self.structured_outputs is None:
            return {"json_schema": schema}
        if schema:
            wrong = "goes with no response_format"
            raise beyond.FieldError("structured_outputs", wrong, seen="both", allowed="one")
        return self.structured_outputs.parameters()

    @property
    def spelled(self) -> dict[str, str]:
        """Fields with another name in errors."""
        demand = self.structured_outputs
        asked = demand is not None and demand.json_demand is not None
        return {"response_format": "structured_outputs.json"} if asked else {}


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    undeclared = beyond.COMPLETIONS
    null_fields = frozenset({"max_tokens"})  # no limit
    prompt: Prompt
    # 0 with echo or prompt_logprobs: the prompt is scored and no token is generated.
    max_tokens: Annotated[int, Field(ge=0, lt=INT_LIMIT)] | None = 16
    logprobs: shapes.TopLogprobs | None = None
    echo: bool = False
    # as in vLLM: bos before a text, even if the text begins with it
    add_special_tokens: bool = True
    best_of: int | None = None

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def wanted_prompt_logprobs(self) -> int | None:
        asked = [self.prompt_logprobs]
        if self.echo:
            asked += [self.logprobs, 0 if self.max_tokens == 0 else None]
        return max((one for one in asked if one is not None), default=None)

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.n):
            wrong = "other than n is not served"
            raise beyond.FieldError("best_of", wrong, seen=self.best_of, allowed=self.n)

    def prompts(self) -> list[str | list[int]]:
        """One or more prompts, each text or token ids. Raises FieldError for an empty list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            allowed = "text, token ids, or a list of these"
            raise beyond.FieldError("prompt", "is empty", seen="[]", allowed=allowed)
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(cast("list[str | list[int]]", self.prompt))


class FunctionCall(shapes.Shape):
    """The function of a tool call."""

    name: str = Field(min_length=1)
    arguments: shapes.Arguments = ""


class CallBody(shapes.Shape):
    """A tool call in a past message."""

    id: str = ""
    function: FunctionCall

    def call(self) -> chat.ToolCall:
        """The gateway's ToolCall."""
        return chat.ToolCall(self.id, self.function.name, self.function.arguments)


class ChatMessage(shapes.Shape):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: shapes.Content | None = None
    reasoning_content: str | None = None
    tool_calls: shapes.Several[CallBody] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def message(self) -> chat.Message:
        """The gateway's Message."""
        named = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        role, text = cast("chat.Role", named), shapes.joined_text(self.content)
        calls = tuple(one.call() for one in self.tool_calls or ())
        reasoning, call_id = self.reasoning_content or "", self.tool_call_id or ""
        return chat.Message(role, text, reasoning, calls, call_id, self.name or "")


class ToolBody(shapes.Shape):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: shapes.FunctionShape


class NamedFunction(shapes.Shape):
    """A function by name."""

    name: str = Field(min_length=1)


class NamedTool(shapes.Shape):
    """A choice of one tool."""

    type: Literal["function"] = "function"
    function: NamedFunction

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.function.name


class ChatBody(shapes.ToolsShape, GenerationBody):
    """POST /v1/chat/completions."""

    undeclared = beyond.CHAT
    strict_field = "tools[].function.strict"
    messages: shapes.Several[ChatMessage] = Field(min_length=1, max_length=shapes.MAX_MESSAGES)
    max_completion_tokens: shapes.Limit | None = None
    logprobs: bool = False
    top_logprobs: shapes.TopLogprobs | None = None
    tools: shapes.Several[ToolBody] | None = Field(None, max_length=shapes.MAX_TOOLS)
    tool_choice: shapes.ChoiceOr[NamedTool] | None = None
    parallel_tool_calls: bool = True

    def functions(self) -> Sequence[shapes.FunctionShape]:
        return [tool.function for tool in self.tools or ()]

    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise beyond.FieldError("top_logprobs", "needs logprobs", seen="logprobs=false")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            wrong = "says another limit than max_completion_tokens"
            raise beyond.FieldError("max_tokens", wrong, seen=both[0])

    def request(self) -> chat.ChatRequest:
        """The gateway's ChatRequest."""
        said = [message.message() for message in self.messages]
        return self.chat_request(said, shapes.tool_choice(self.tool_choice))
