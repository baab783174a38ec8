"""Converts the text of a JSON schema to llguidance's grammar and matcher, or rejects it.

The gateway uses `check_json_schema` too, so this module imports no torch. It imports llguidance,
which is part of the engine's installation, only where a grammar is built.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidInput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_SCHEMA_BYTES = 64 * 1024
"""Largest schema, in UTF-8 bytes."""
MAX_SPACE = 20
"""Longest run of white space. It suffices for a line break and indentation, and stops a model that
would repeat white space for ever.
"""
FORM: JsonCompileOptions = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": rf"[ \t\r\n]{{1,{MAX_SPACE}}}",
}
"""Options that keep the text JSON; they override a schema's own "x-guidance"."""
_SAID_AT_MOST = 200


class GrammarFault(Exception):
    """A grammar that cannot be built or followed further.

    It is wrong, a limit is reached, or no token may follow.
    """

    def __init__(self, said: str) -> None:
        super().__init__(" ".join(said.split())[:_SAID_AT_MOST])


def refused(why: object, schema: str) -> InvalidInput:
    """The error for a schema that cannot be followed."""
    return InvalidInput(
        f"response_format holds a JSON schema that cannot be followed: {why}", seen=schema[:80]
    )


def check_json_schema(schema: str, *, ignore_eos: bool) -> dict[str, Any]:
    """The parsed schema.

    Raises InvalidInput naming response_format. Only building its grammar reveals whether a schema
    works.
    """
    if ignore_eos:
        raise InvalidInput(
            "response_format ends a response where its JSON ends",
            seen="ignore_eos=true",
            allowed="ignore_eos=false",
        )

    size = len(schema.encode("utf-8", "replace"))
    if size > MAX_SCHEMA_BYTES:
        raise InvalidInput(
            "response_format holds too large a schema",
            seen=size,
            allowed=f"{MAX_SCHEMA_BYTES} bytes",
        )

    try:
        parsed: Any = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise refused(f"it is not JSON: {error}", schema) from error

    if not isinstance(parsed, dict):
        raise refused("it is not a JSON object", schema)
    return parsed


def grammar_of(schema: str, parsed: dict[str, Any]) -> str:
    """llguidance's grammar of a checked schema, not yet built; {} allows any JSON object.

    Raises InvalidInput.
    """
    from llguidance import LLMatcher

    try:
        return LLMatcher.grammar_from_json_schema(
            schema if parsed else '{"type":"object"}', overrides=FORM
        )
    except ValueError as error:
        raise refused(error, schema) from error


def build_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning, with its first mask computed. Raises GrammarFault.

    The limits keep a step to tens of milliseconds and a matcher to tens of megabytes. They do not
    limit the time of building it.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        max_lexer_states=10_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarFault(matcher.get_error())
    return matcher
