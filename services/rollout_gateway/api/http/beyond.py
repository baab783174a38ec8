"""Handles request fields beyond the declared fields, with a table for each API.

An undeclared field is refused by name, because ignoring it would change the meaning of the request.
There are two exceptions. `harmless` fields do not change the answer in a way that a caller could
miss; the header x-paceline-ignored lists them. `neutral` fields request the default behaviour. Null
and empty values request nothing.

Paths have the form of error messages, without indices: messages[].cache_control.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from paceline.rpc.http_requests import SHOWN_CHARACTERS
from paceline.rpc.http_requests import FieldError as FieldError

NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values that request nothing."""
_SCALARS = (str, int, float, type(None))
"""Types of most fields. They get a quick test first, since the test for a model is slow."""


@dataclass(frozen=True, slots=True)
class Beyond:
    """Undeclared fields that an API accepts."""

    harmless: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields with their allowed values; harmless fields without an entry may have any value."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Parts of messages that a chat template may leave out, with the path of each part."""

    def judge(self, body: BaseModel) -> tuple[str, ...]:
        """Sorted paths of a body's harmless fields. Removes all undeclared fields from the body.

        Raises FieldError (UNKNOWN_PARAMETER) for any other undeclared field.
        """
        ignored = set()
        for path, spelled, value in _extras(body, "", ""):
            if value in NOTHING:
                continue
            allowed = self.neutral.get(path, ())
            listed = any(type(one) is type(value) and one == value for one in allowed)
            if not listed and (allowed or path not in self.harmless):
                message, reason = "is not served", "UNKNOWN_PARAMETER"
                seen = repr(value)[:SHOWN_CHARACTERS]
                served = " or ".join(map(repr, allowed)) or "none"
                raise FieldError(spelled, message, reason=reason, seen=seen, allowed=served)
            if path in self.harmless:
                ignored.add(path)
        return tuple(sorted(ignored))


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


def _accept(paths: str, *values: Any) -> dict[str, tuple[Any, ...]]:
    """Accept each path of the text with these values."""
    return dict.fromkeys(paths.split(), values)


_OF_A_CALLER = """
    user service_tier safety_identifier prompt_cache_key prompt_cache_retention request_id
"""
"""Caller, billing and cache hints: they do not change an answer."""
_OF_COMPLETIONS = f"""{_OF_A_CALLER}
    metadata store stream_options.include_obfuscation
    response_format.json_schema.name response_format.json_schema.description
"""
_CHAT_MESSAGES = """
    messages[].refusal messages[].annotations messages[].parsed messages[].reasoning messages[].id
    messages[].cache_control messages[].images messages[].reasoning_details
    messages[].thinking_blocks messages[].provider_specific_fields
    messages[].content[].cache_control messages[].content[].annotations
    messages[].content[].provider_specific_fields
    messages[].tool_calls[].index messages[].tool_calls[].cache_control
    messages[].tool_calls[].extra_content messages[].tool_calls[].provider_specific_fields
    messages[].tool_calls[].function.parsed_arguments
    messages[].tool_calls[].function.provider_specific_fields
    tools[].cache_control tools[].function.cache_control
"""
"""Fields that clients send back with a history, and marks for prompt caches."""
_CHAT_PARTS = {
    **_accept("messages[].tool_calls[].type", "function"),
    **_accept("add_generation_prompt", True),
    **_accept("continue_final_message", False),
}
_SAMPLED = {
    **_accept("use_beam_search no_stop_trim return_hidden_states", False),
    **_accept("skip_special_tokens spaces_between_special_tokens", True),
    **_accept("length_penalty", 1.0, 1),
    **_accept("priority", 0),
    **_accept("response_format.json_schema.strict", True, False),
}
"""vLLM's and SGLang's own parameters, at values that disable them."""

COMPLETIONS = Beyond(frozenset(_OF_COMPLETIONS.split()), _SAMPLED)
CHAT = Beyond(
    frozenset(f"{_OF_COMPLETIONS} {_CHAT_MESSAGES} prediction reasoning_effort verbosity".split()),
    {
        **_SAMPLED,
        **_CHAT_PARTS,
        **_accept("modalities", ["text"]),
        **_accept("add_special_tokens", False),
        **_accept("best_of", 1),
        **_accept("separate_reasoning stream_reasoning include_reasoning", True),
    },
    {"name": "messages[].name", "reasoning": "messages[].reasoning_content"},
)
TOKENS = Beyond(
    frozenset(_CHAT_MESSAGES.split()), {**_CHAT_PARTS, **_accept("return_token_strs", False)}
)
_OF_RESPONSES = f"""{_OF_A_CALLER}
    client_metadata include max_tool_calls reasoning stream_options text.verbosity
    text.format.description input[].id input[].status input[].phase
    input[].encrypted_content input[].parsed_arguments input[].provider_specific_fields
    input[].content[].annotations input[].content[].logprobs input[].content[].parsed
    input[].content[].provider_specific_fields
"""
RESPONSES = Beyond(
    frozenset(_OF_RESPONSES.split()),
    {
        **_accept("include", ["reasoning.encrypted_content"]),
        **_accept("priority top_logprobs", 0),
        **_accept("top_k", -1),
        **_accept("min_p", 0.0),
        **_accept("repetition_penalty", 1.0),
        **_accept("truncation", "disabled"),
        **_accept("background", False),
        **_accept("text.format.strict", True, False),
    },
    {"reasoning": "input[].summary"},
)
_OF_MESSAGES = """
    metadata service_tier inference_geo thinking context_management cache_control
    output_config.effort system[].cache_control system[].citations
    messages[].provider_specific_fields messages[].content[].provider_specific_fields
    messages[].content[].cache_control messages[].content[].citations
    messages[].content[].signature messages[].content[].data messages[].content[].caller
    messages[].content[].content[].cache_control messages[].content[].content[].citations
    tools[].cache_control tools[].eager_input_streaming tools[].input_examples tools[].strict
    tool_choice.disable_parallel_tool_use
"""
MESSAGES = Beyond(
    frozenset(_OF_MESSAGES.split()),
    _accept("tools[].defer_loading", False),
    {"reasoning": "messages[].content[].thinking"},
)
