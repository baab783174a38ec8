"""Keyword arguments of a generation: names and types. Defaults are the gateway's.

A session for training takes temperature > 0 and neither top_p < 1, top_k, min_p nor penalties: the
gateway refuses these with TrainabilityError. To use them, open the session with trainable=False;
with override_sampling=True the run's own sampling is used instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from paceline.errors import InvalidInput


class GenerationOptions(TypedDict, total=False):
    """Keyword arguments of `generate`."""

    model: str  # the served one's name; left out, it is whatever is served
    temperature: float  # 0, or 1e-20 to 10; 1.0 unless given
    max_tokens: int
    stop: str | Sequence[str]
    seed: int
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[str, float]  # token id as text -> bias
    ignore_eos: bool  # continue after an end token
    min_tokens: int  # no end before this many tokens
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool  # the stop string stays in the text
    allowed_token_ids: Sequence[int]  # the only tokens drawn
    prompt_logprobs: int  # log-probs of the prompt in `raw`, with so many alternatives each
    truncate_prompt_tokens: int  # last tokens of the prompt that are read; -1: as many as fit
    response_format: Mapping[str, Any]
    structured_outputs: Mapping[str, Any]  # one of json, regex, choice and grammar
    extra: Mapping[str, Any]  # further fields of the body, unchanged
    deadline_s: float  # seconds for the whole call, including retries


class ChatOptions(GenerationOptions, total=False):
    """Keyword arguments of `chat` and `chat_stream`."""

    tools: Sequence[Mapping[str, Any]]  # OpenAI's {"type": "function", "function": {...}}
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    logprobs: bool
    top_logprobs: int
    return_token_ids: bool


_NOT_IN_BODY = ("extra", "deadline_s")
_OUR_OWN = {"n", "stream", "stream_options", "messages", "prompt"}
SAMPLING = frozenset(GenerationOptions.__annotations__)
CHAT_OPTIONS = frozenset(ChatOptions.__annotations__)


def body_fields(options: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """The fields of the body.

    Raises InvalidInput for an unknown name, or for an extra field with a known name.
    """
    unknown = sorted(set(options) - known)
    if unknown:
        raise InvalidInput(
            "unknown option of a generation",
            seen=", ".join(unknown),
            allowed=", ".join(sorted(known)),
        )

    extra = dict(options.get("extra") or {})
    taken = sorted(set(extra) & (known | _OUR_OWN))
    if taken:
        raise InvalidInput(
            "extra holds fields that are not free", seen=", ".join(taken), allowed="other names"
        )

    return {name: value for name, value in options.items() if name not in _NOT_IN_BODY} | extra
