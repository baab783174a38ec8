"""What a response_format may ask for: the text of a JSON schema to llguidance's grammar, or why it is refused.

Owns the limits, the form of the JSON and the errors; no tokenizer and no masks (embedded/grammars.py). It imports no
torch, so that the gateway refuses what its engine would, and llguidance, which comes with the engine, at its first use.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidInput

if TYPE_CHECKING:
    from llguidance import LLParserLimits
    from llguidance._lib import JsonCompileOptions

MAX_SCHEMA_BYTES = 64 * 1024
"""UTF-8 bytes of a schema at most."""
MAX_SPACE = 32
"""White space at most at a time: enough for a line break and its indentation, and no model goes on with it for ever."""
FORM: JsonCompileOptions = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": rf"[ \t\r\n]{{1,{MAX_SPACE}}}",
}
"""What keeps the text JSON; it overrides a schema's own "x-guidance"."""
_SAID_AT_MOST = 200


def parser_limits() -> LLParserLimits:
    """Bounds of one grammar: tens of milliseconds to build, milliseconds a token, tens of megabytes."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        max_lexer_states=10_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def refused(why: str, schema: str) -> InvalidInput:
    """The error for a schema that cannot be followed."""
    cut = why.strip().partition("\n")[0][:_SAID_AT_MOST]
    return InvalidInput(f"response_format holds a JSON schema that cannot be followed: {cut}", seen=schema[:80])


def check_json_schema(schema: str, *, ignore_eos: bool) -> None:
    """Raises InvalidInput naming response_format; the engine may still refuse what its vocabulary cannot say."""
    if ignore_eos:
        raise InvalidInput(
            "response_format ends a response where its JSON ends", seen="ignore_eos=true", allowed="ignore_eos=false"
        )
    size = len(schema.encode("utf-8", "replace"))
    if size > MAX_SCHEMA_BYTES:
        raise InvalidInput("response_format holds too large a schema", seen=size, allowed=f"{MAX_SCHEMA_BYTES} bytes")
    grammar_of(schema)


@lru_cache(maxsize=16)
def grammar_of(schema: str) -> str:
    """llguidance's grammar of a schema's JSON texts; "{}" is any JSON object. Raises InvalidInput."""
    from llguidance import LLMatcher

    try:
        parsed: Any = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise refused(f"it is not JSON: {error}", schema) from error
    if not isinstance(parsed, dict):
        raise refused("it is not a JSON object", schema)
    try:
        text = LLMatcher.grammar_from_json_schema(schema if parsed else '{"type":"object"}', overrides=FORM)
    except ValueError as error:
        raise refused(str(error), schema) from error
    wrong, said = LLMatcher.validate_grammar_with_warnings(text, limits=parser_limits())
    if wrong:
        raise refused(" ".join(said), schema)
    return text
