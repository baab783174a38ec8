"""Bodies of the OpenAI-shaped requests. Owns which fields exist, their types and ranges; unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from paceline.errors import InvalidInput
from paceline.v1 import trajectory_pb2 as tpb
from rollout_gateway.engines.base import MAX_BIASED_TOKENS

MAX_CHOICES = 128
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class GenerationBody(BaseModel):
    """What both kinds of completion understand."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str = ""
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: int = Field(0, ge=0, lt=2**31)
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10, allow_inf_nan=False)] = 1.0  # extension
    logit_bias: dict[TokenId, Bias] | None = Field(None, max_length=MAX_BIASED_TOKENS)  # JSON spells the ids as text
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    stream: bool = False
    ignore_eos: bool = False  # extension: go on after an end token
    return_token_ids: bool = False  # extension: token_ids in each choice

    def wanted_logprobs(self) -> int | None:
        """Alternatives per token; None when no log-probs are asked for."""
        return None

    def limit(self) -> int | None:
        """Tokens to generate at most."""
        return self.max_tokens

    def sampling(self, index: int, default_limit: int) -> tpb.SamplingParams:
        """Sampling of choice `index`: with a seed, choice i draws with seed + i."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        params = tpb.SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=self.limit() or default_limit,
            stop=stops,
            ignore_eos=self.ignore_eos,
            top_logprobs=self.wanted_logprobs() or 0,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or {},
        )
        if self.seed is not None:
            params.seed = self.seed + index
        return params


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: int | None = Field(16, ge=1, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        """Raises InvalidInput for what is not served."""
        if self.echo:
            raise InvalidInput("echo is not served", seen=True, allowed=False)
        if self.suffix:
            raise InvalidInput("suffix is not served", seen=self.suffix)
        if self.best_of not in (None, self.n):
            raise InvalidInput("best_of other than n is not served", seen=self.best_of, allowed=self.n)

    def prompts(self) -> list[str | list[int]]:
        """One or more prompts, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidInput("prompt is empty", allowed="text, token ids, or a list of these")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(cast("list[str | list[int]]", self.prompt))


class ChatMessage(BaseModel):
    """One message; fields the template may use are kept."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    def rendered(self) -> dict[str, Any]:
        """The message with its text parts joined. Raises InvalidInput for parts that are no text."""
        message = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            if any(part.get("type") != "text" for part in self.content):
                raise InvalidInput(
                    "messages may hold text parts only", seen=[part.get("type") for part in self.content]
                )
            message["content"] = "".join(str(part.get("text", "")) for part in self.content)
        return {"content": "", **message}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream_options: dict[Literal["include_usage"], bool] | None = None

    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens
