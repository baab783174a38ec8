"""What a caller may ask of a generation: names and types of keyword arguments. Defaults are the
gateway's.

A session that is to be trained takes temperature > 0 and neither top_p < 1, top_k, min_p nor
penalties: the gateway refuses them with TrainabilityError. Open it with trainable=False to use
them, or with override_sampling=True to have the run's own sampling used instead.
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
    ignore_eos: bool  # go on after an end token
    min_tokens: int  # before them nothing ends the answer
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool  # what ended the answer stays in its text
    allowed_token_ids: Sequence[int]  # the only ones drawn
    prompt_logprobs: int  # log-probs of the prompt in `raw`, with so many alternatives each
    truncate_prompt_tokens: int  # only so many last tokens of the prompt are read; -1: what fits
    response_format: Mapping[str, Any]
    structured_outputs: Mapping[str, Any]  # one of json, regex, choice and grammar
    extra: Mapping[str, Any]  # further fields of the body, as they are
    deadline_s: float  # seconds for the whole call, retries included


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

    Raises InvalidInput for a name that is not known, or an extra that is not free.
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
