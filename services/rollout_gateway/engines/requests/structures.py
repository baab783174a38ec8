"""Checks the demand on the form of a response, and converts it to llguidance's grammar.

The demand is JSON of a schema, a regular expression, a choice of texts, a grammar, or tool calls.
The gateway rejects requests by the same check, so this module imports no torch. It imports
llguidance, which is part of the engine's installation, only where a grammar is made.
grammar_judge.py builds grammars within limits.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.engines.sampling import Sampling

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
_MOST_CHARACTERS = 200


class GrammarFault(Exception):
    """A grammar that cannot be built or followed further.

    It is wrong, a limit is reached, or no token may follow.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split())[:_MOST_CHARACTERS])


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


FIELDS = {
    "json_schema": "response_format",
    "regex": "structured_outputs.regex",
    "choice": "structured_outputs.choice",
    "grammar": "structured_outputs.grammar",
    "tool_grammar": "tools",
}
"""Parameters of Sampling that constrain the form of a response, with their names in the API."""
MAX_CHOICES = 4096
"""Most texts of a choice."""
MAX_TOOL_GRAMMAR_BYTES = 512 * 1024
"""Largest grammar of all tools, in UTF-8 bytes."""
_GBNF = "::="
"""Sign of a grammar in llama.cpp's notation, which vLLM's examples use."""
_SEEN = 80


class Structure(NamedTuple):
    """The one demand on a response. It is hashable, and the built grammar is cached under it."""

    kind: str  # a key of FIELDS
    text: str  # the demand's text; a choice has its texts as a JSON array
    after: str = ""  # text up to which the response is free

    @property
    def field(self) -> str:
        """The demand's name in the API."""
        return FIELDS[self.kind]

    @property
    def begins_free(self) -> bool:
        """Whether the response may start with free text, where a lost character does no harm."""
        return bool(self.after) or self.kind == "tool_grammar"

    def refused(self, why: object) -> InvalidInput:
        """The error for a demand that cannot be met."""
        return InvalidInput(f"{self.field} cannot be followed: {why}", seen=self.text[:_SEEN])


def beyond_json(sampling: Sampling) -> bool:
    """Whether a demand other than a JSON schema applies."""
    return sampling.structured and not sampling.json_schema


def structure_of(sampling: Sampling) -> Structure | None:
    """The demand on the form of the response; None when the response is free.

    Raises InvalidInput naming the field, also for two demands at once. Only building its grammar
    reveals whether a demand works.
    """
    asked = [name for name in FIELDS if getattr(sampling, name)]
    if not asked:
        return None
    if len(asked) > 1:
        message = f"{FIELDS[asked[1]]} goes with no other demand on the response"
        seen = ", ".join(FIELDS[name] for name in asked)
        raise InvalidInput(message, seen=seen, allowed="one of them")
    kind, text = asked[0], getattr(sampling, asked[0])
    if kind == "choice":
        text = json.dumps(text, ensure_ascii=False)
    found = Structure(kind, text, sampling.free_until)
    _check(found, sampling)
    return found


def structure_grammar(structure: Structure, after_token: int | None = None) -> str:
    """llguidance's grammar, not yet built. Raises InvalidInput naming the field.

    after_token: the token that represents the whole of `after`, if the vocabulary has it.
    """
    grammar = _demanded(structure)
    return _behind(structure.after, after_token, grammar) if structure.after else grammar


def _demanded(structure: Structure) -> str:
    from llguidance import LLMatcher

    text = structure.text
    match structure.kind:
        case "json_schema":
            schema = text if parse_schema(structure) else '{"type":"object"}'
            try:
                return LLMatcher.grammar_from_json_schema(schema, overrides=FORM)
            except ValueError as error:
                raise structure.refused(error) from error
        case "regex":
            return str(LLMatcher.grammar_from_regex(text))
        case "choice":
            spelled = (json.dumps(one, ensure_ascii=False) for one in json.loads(text))
            return "start: " + " | ".join(spelled)
        case "grammar":
            return _lark(structure)
        case _:
            return text


def parse_schema(structure: Structure) -> dict[str, Any]:
    """The schema of a JSON response; {} allows any JSON object. Raises InvalidInput.

    Only building its grammar reveals whether a schema works.
    """
    try:
        parsed: Any = json.loads(structure.text)
    except (ValueError, RecursionError) as error:
        raise structure.refused(f"it is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise structure.refused("it is not a JSON object")
    return parsed


def _behind(after: str, token: int | None, grammar: str) -> str:
    """The grammar after free text, the end of that text and a little white space."""
    in_json = grammar.lstrip().startswith("{")
    inner = json.loads(grammar)["grammars"] if in_json else [{"lark_grammar": grammar}]
    inner[0]["name"] = "answer"
    as_token = f" | TEXT? <[{token}]>" if token is not None else ""
    lines = (
        f"start: (ended{as_token}) SPACE? @answer",
        f"ended[lazy]: /(?s:.*)/ {json.dumps(after, ensure_ascii=False)}",
        "TEXT: /(?s:.+)/",
        r"SPACE: /[ \t\r\n]{1,20}/",
    )
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": "\n".join(lines)}, *inner]})


def _check(found: Structure, sampling: Sampling) -> None:
    if sampling.ignore_eos:
        message = f"{found.field}: a response ends where it is complete"
        raise InvalidInput(message, seen="ignore_eos=true", allowed="ignore_eos=false")
    try:
        size = len(found.text.encode())
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise found.refused("it is no text") from error
    most = MAX_TOOL_GRAMMAR_BYTES if found.kind == "tool_grammar" else MAX_SCHEMA_BYTES
    if size > most:
        raise InvalidInput(f"{found.field} is too large", seen=size, allowed=f"{most} bytes")
    if found.kind == "json_schema":
        parse_schema(found)
    if len(sampling.choice) > MAX_CHOICES:
        message = f"{found.field} has too many texts"
        raise InvalidInput(message, seen=len(sampling.choice), allowed=MAX_CHOICES)
    if not all(sampling.choice):
        message = f"{found.field} holds an empty text"
        raise InvalidInput(message, seen="''", allowed="texts that are not empty")


def _lark(structure: Structure) -> str:
    text = structure.text
    if text.lstrip().startswith("{"):
        raise structure.refused("it is neither Lark nor GBNF")
    if _GBNF not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:  # the parser raises errors of any class
        raise structure.refused(f"its GBNF cannot be read: {error}") from error
