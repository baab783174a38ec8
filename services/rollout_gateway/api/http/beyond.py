"""Handles request fields beyond the declared fields, with a table for each API.

An undeclared field is refused by name, because ignoring it would change the meaning of the request.
There are two exceptions. `harmless` fields do not change the answer in a way that a caller could
miss; the header x-paceline-ignored lists them. `neutral` fields request the default behaviour. Null
and empty values request nothing.

Paths have the form of error messages, without indices: messages[].cache_control.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from paceline.errors import InvalidInput

IGNORED_HEADER = "x-paceline-ignored"
SHOWN_CHARACTERS = 100
NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values that request nothing."""
Values = tuple[Any, ...] | None
"""Allowed values of a field; None: any."""


_SCALARS = (str, int, float, type(None))
"""Types of most fields. They get a quick test first, since the test for a model is slow."""


class UnknownField(InvalidInput):
    """A field of the body that is not served."""

    def __init__(self, path: str, value: object, allowed: Values) -> None:
        super().__init__(
            f"{path}: is not served",
            reason="UNKNOWN_PARAMETER",
            seen=repr(value)[:SHOWN_CHARACTERS],
            allowed=" or ".join(map(repr, allowed)) if allowed else "none",
        )
        self.field = path


@dataclass(frozen=True, slots=True)
class Beyond:
    """Undeclared fields that an API accepts."""

    harmless: Mapping[str, Values] = field(default_factory=dict)
    neutral: Mapping[str, Values] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    """Parts of messages that a chat template may leave out, with the path of each part."""

    def judge(self, body: BaseModel) -> tuple[str, ...]:
        """Sorted paths of a body's harmless fields. Removes all undeclared fields from the body.

        Raises UnknownField for any other undeclared field.
        """
        ignored = set()
        for path, spelled, value in _extras(body, "", ""):
            if value in NOTHING:
                continue
            if _among(value, self.harmless, path):
                ignored.add(path)
            elif not _among(value, self.neutral, path):
                known = (self.neutral.get(path) or ()) + (self.harmless.get(path) or ())
                raise UnknownField(spelled, value, known)
        return tuple(sorted(ignored))


def _among(value: object, table: Mapping[str, Values], path: str) -> bool:
    if path not in table:
        return False
    allowed = table[path]
    return allowed is None or any(type(one) is type(value) and one == value for one in allowed)


def _extras(value: Any, path: str, spelled: str) -> Iterator[tuple[str, str, Any]]:
    """(path without indices, path with indices, value) of every undeclared field."""
    if isinstance(value, list):
        if value and isinstance(value[0], BaseModel):
            for index, one in enumerate(value):
                yield from _extras(one, f"{path}[]", f"{spelled}[{index}]")
        return
    if not isinstance(value, BaseModel):
        return
    dot = "." if path else ""
    extra, value.__pydantic_extra__ = value.__pydantic_extra__ or {}, {}
    for name, given in extra.items():
        shown = name[:SHOWN_CHARACTERS]
        yield f"{path}{dot}{shown}", f"{spelled}{dot}{shown}", given
    fields = type(value).model_fields
    for name, given in value.__dict__.items():
        if not isinstance(given, _SCALARS) and isinstance(given, BaseModel | list):
            shown = fields[name].alias or name
            yield from _extras(given, f"{path}{dot}{shown}", f"{spelled}{dot}{shown}")


def _any(*paths: str) -> dict[str, Values]:
    """Accept each path with any value."""
    return dict.fromkeys(paths)


def _of_gateways(*places: str) -> list[str]:
    """Fields that LiteLLM adds to each answer and its callers send back."""
    return [f"{place}.provider_specific_fields" for place in places]


_OF_A_CALLER = _any(
    "user",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
)
"""Caller, billing and cache hints: they do not change an answer."""
_OF_COMPLETIONS = {
    **_OF_A_CALLER,
    **_any(
        "metadata",
        "store",
        "stream_options.include_obfuscation",
        "response_format.json_schema.name",
        "response_format.json_schema.description",
    ),
}
_CHAT_MESSAGES = _any(
    "messages[].refusal",
    "messages[].annotations",
    "messages[].parsed",
    "messages[].reasoning",
    "messages[].id",
    "messages[].cache_control",
    "messages[].content[].cache_control",
    "messages[].content[].annotations",
    "messages[].tool_calls[].index",
    "messages[].tool_calls[].function.parsed_arguments",
    "messages[].tool_calls[].cache_control",
    "messages[].tool_calls[].extra_content",
    "messages[].images",
    "messages[].reasoning_details",
    "messages[].thinking_blocks",
    *_of_gateways("messages[]", "messages[].content[]", "messages[].tool_calls[]"),
    *_of_gateways("messages[].tool_calls[].function"),
    "tools[].cache_control",
    "tools[].function.cache_control",
)
"""Fields that clients send back with a history, and marks for prompt caches."""
_CHAT_PARTS: dict[str, Values] = {
    "messages[].tool_calls[].type": ("function",),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
_SAMPLED: dict[str, Values] = {
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "no_stop_trim": (False,),
    "priority": (0,),
    "return_hidden_states": (False,),
    "response_format.json_schema.strict": (True, False),
}
"""vLLM's and SGLang's own parameters, at values that disable them."""

COMPLETIONS = Beyond(_OF_COMPLETIONS, _SAMPLED)
CHAT = Beyond(
    {
        **_OF_COMPLETIONS,
        **_CHAT_MESSAGES,
        **_any(
            "prediction",
            "reasoning_effort",
            "verbosity",
        ),
    },
    {
        **_SAMPLED,
        **_CHAT_PARTS,
        "modalities": (["text"],),
        "add_special_tokens": (False,),
        "best_of": (1,),
        "separate_reasoning": (True,),
        "stream_reasoning": (True,),
        "include_reasoning": (True,),
    },
    {"name": "messages[].name", "reasoning": "messages[].reasoning_content"},
)
TOKENS = Beyond(_CHAT_MESSAGES, {**_CHAT_PARTS, "return_token_strs": (False,)})
RESPONSES = Beyond(
    {
        **_OF_A_CALLER,
        **_any(
            "client_metadata",
            "max_tool_calls",
            "reasoning",
            "stream_options",
            "text.verbosity",
            "text.format.description",
            "input[].id",
            "input[].status",
            "input[].phase",
            "input[].encrypted_content",
            "input[].content[].annotations",
            "input[].content[].logprobs",
            "input[].content[].parsed",
            "input[].parsed_arguments",
            *_of_gateways("input[]", "input[].content[]"),
        ),
        "include": (["reasoning.encrypted_content"],),
    },
    {
        "priority": (0,),
        "top_k": (-1,),
        "min_p": (0.0,),
        "repetition_penalty": (1.0,),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "text.format.strict": (True, False),
        "input[].content[].type": None,
        "input[].summary[].type": None,
    },
    {"reasoning": "input[].summary"},
)
MESSAGES = Beyond(
    _any(
        "metadata",
        "service_tier",
        "inference_geo",
        "thinking",
        "context_management",
        "cache_control",
        "output_config.effort",
        "system[].cache_control",
        "system[].citations",
        "messages[].content[].cache_control",
        "messages[].content[].citations",
        "messages[].content[].signature",
        "messages[].content[].data",
        "messages[].content[].caller",
        *_of_gateways("messages[]", "messages[].content[]"),
        "messages[].content[].content[].cache_control",
        "messages[].content[].content[].citations",
        "tools[].cache_control",
        "tools[].eager_input_streaming",
        "tools[].input_examples",
        "tools[].strict",
        "tool_choice.disable_parallel_tool_use",
    ),
    {"tools[].defer_loading": (False,)},
    {"reasoning": "messages[].content[].thinking"},
)
