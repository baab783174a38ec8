"""Arguments of a call as text between tags: their JSON by the tool's schema, and the permitted
texts for JSON that matches the schema.

This form writes a string unchanged and every other value as JSON, so only the schema distinguishes
"42" from 42. If the schema leaves it open, the text is read as JSON.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.errors import InvalidInput
from paceline.services.rollout_gateway.chat.tool_formats import base, lark

_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Non-string values in the form of Jinja templates, which models imitate."""
_UNIONS = ("anyOf", "oneOf")
_SCALARS = {"string", "boolean", "null", "integer", "number"}
_ABOUT = {"type", "title", "description", "default", "examples", "deprecated"}
"""Keywords that restrict a scalar no further than its type."""
_BEYOND = (
    *(*_UNIONS, "allOf", "not", "if", "patternProperties", "propertyNames", "minProperties"),
    *("maxProperties", "dependentRequired", "dependentSchemas"),
)
"""Keywords of an object that this form cannot enforce."""
_DEEPEST_REFERENCE = 20


class Tags(NamedTuple):
    """Text around a parameter's value."""

    before: str  # with {} for the name
    close: str  # text that the value cannot contain
    end: str  # `close` with the line breaks around it

    def write_arguments(self, arguments: str) -> str:
        """A JSON object of arguments as text between tags; other text stays unchanged."""
        try:
            members = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        if not isinstance(members, dict):
            return arguments
        parts = []
        for name, value in members.items():
            text = value if isinstance(value, str) else lark.quoted(value)
            parts.append(f"{self.before.replace('{}', name)}{text}{self.end}")
        return "".join(parts)


class Parameters:
    """The arguments of one tool."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        self._object = self._resolved(schema)
        found = self._object.get("properties")
        self._properties: Mapping[str, Any] = found if isinstance(found, Mapping) else {}

    def json(self, written: Mapping[str, str]) -> str:
        """The arguments as a JSON object, from the text of each."""
        pairs = ((lark.quoted(key), self._value(key, text)) for key, text in written.items())
        return f"{{{', '.join(map(': '.join, pairs))}}}"

    def _value(self, key: str, text: str) -> str:
        kinds = self._kinds(self._properties.get(key, {}))
        written = _PYTHON.get(text.strip(), text.strip())
        try:
            kind = _KINDS[type(base.decode_json(written))]
        except base.Deviation:
            kind = "string"
        return written if kind != "string" and _fits(kind, kinds) else lark.quoted(text)

    # ---- grammar

    def grammar(self, rules: lark.Rules, tags: Tags) -> lark.Lark:
        """All arguments in the order of the schema; optional arguments may be absent.

        Raises InvalidInput for a schema that this form cannot enforce.
        """
        for keyword in _BEYOND:
            if keyword in self._object:
                raise _beyond(keyword, "an object with properties")
        required = self._object.get("required", ())
        names = list(dict.fromkeys([*self._properties, *required]))
        if not names and self._object.get("additionalProperties") is not False:
            before, after = tags.before.split("{}")
            end = rules.until(tags.end, tags.close)
            any_one = [rules.text(before), rules.regex(r"[\w.-]+"), rules.text(after), end]
            return rules.any_number(rules.sequence(any_one))
        parts = []
        for name in names:
            if not name or set("<>\n\0") & set(name) or name != name.strip():
                raise _beyond(f"a parameter named {name[:40]!r}", "a name without tags in it")
            value = self._value_grammar(name, rules, tags)
            one = rules.sequence([rules.text(tags.before.replace("{}", name)), value])
            parts.append(one if name in required else rules.any_number(one, 1))
        return rules.sequence(parts)

    def _value_grammar(self, name: str, rules: lark.Rules, tags: Tags) -> lark.Lark:
        """The value of a parameter and the end of its tags."""
        schema = self._resolved(self._properties.get(name, {}))
        kinds = self._kinds(schema)
        if kinds is not None and "string" not in kinds:
            named = {"$defs", "definitions"} & self._root.keys()
            definitions = {key: self._root[key] for key in named}
            return rules.sequence([rules.json({**schema, **definitions}), rules.text(tags.end)])
        if kinds == {"string"}:
            return self._strings(name, schema, rules, tags)
        if kinds is not None:
            self._check_union(name, schema, kinds)
        return rules.until(tags.end, tags.close)

    def _strings(
        self, name: str, schema: Mapping[str, Any], rules: lark.Rules, tags: Tags
    ) -> lark.Lark:
        texts = _values(schema)
        if texts is not None:
            if any(tags.close in one for one in texts):
                raise _beyond(f"{name}: a text that holds {tags.close}", "other texts")
            return rules.either([rules.text(one + tags.end) for one in texts])
        if unions := [key for key in (*_UNIONS, "allOf") if key in schema]:
            raise _beyond(f"{name}: {unions[0]} of strings", "one form of string, or enum")
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        bodies = [f"(?s:.{{{least},{most}}})"] if least or most != "" else []
        if "pattern" in schema:
            bodies.append(_matching(name, str(schema["pattern"])))
        return rules.until(tags.end, tags.close, *bodies)

    def _check_union(self, name: str, schema: Mapping[str, Any], kinds: set[str]) -> None:
        """Accepts any text if each type of the union is unrestricted."""
        branches = [self._resolved(one) for key in _UNIONS for one in schema.get(key, ())]
        about = _ABOUT.union(_UNIONS) if branches else _ABOUT
        narrowed = schema.keys() - about or any(one.keys() - _ABOUT for one in branches)
        if narrowed or kinds - _SCALARS:
            raise _beyond(f"{name}: a string or something narrower", "types alone, no objects")

    # ---- types

    def _kinds(self, schema: object, depth: int = 0) -> set[str] | None:
        """Types that a value may have; None: any."""
        schema = self._resolved(schema)
        values = _values(schema)
        if isinstance(values, list):
            return {_KINDS.get(type(value), "object") for value in values}
        named = schema.get("type")
        if isinstance(named, str | list):
            return {named} if isinstance(named, str) else set(map(str, named))
        for key in _UNIONS:
            branches = schema.get(key)
            if isinstance(branches, list) and depth < _DEEPEST_REFERENCE:
                found = [self._kinds(one, depth + 1) for one in branches]
                known = [one for one in found if one is not None]
                return set().union(*known) if len(known) == len(found) else None
        return None

    def _resolved(self, schema: object) -> Mapping[str, Any]:
        """The schema after references to definitions of the same document; {} after other
        references.
        """
        for _ in range(_DEEPEST_REFERENCE):
            if not isinstance(schema, Mapping):
                return {}
            path = schema.get("$ref")
            if not isinstance(path, str):
                return schema
            schema = _at(self._root, path) if path.startswith("#") else None
        return {}


def _values(schema: Mapping[str, Any]) -> Any:
    """The only permitted values; None without a list of them."""
    return schema.get("enum", [schema["const"]] if "const" in schema else None)


def _fits(kind: str, kinds: set[str] | None) -> bool:
    if kinds is None or kind in kinds:
        return True
    if kind == "number":  # 1.0 also counts as an integer
        return "integer" in kinds and "string" not in kinds
    return kind == "integer" and "number" in kinds


def _at(root: Mapping[str, Any], path: str) -> object:
    found: object = root
    for part in path.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _matching(name: str, pattern: str) -> str:
    """A regular expression for the whole text, from a pattern that may match anywhere in it."""
    inner = re.sub(r"\\.", "", pattern, flags=re.DOTALL)  # without escaped characters
    first, last = pattern.startswith("^"), inner.endswith("$")
    if (first or last) and "|" in inner:
        raise _beyond(f"{name}: a pattern with anchors and alternatives", "a pattern without one")
    body = pattern[1 if first else 0 : len(pattern) - 1 if last else len(pattern)]
    return f"{'' if first else lark.ANY_TEXT}(?:{body}){'' if last else lark.ANY_TEXT}"


def _beyond(seen: str, allowed: str) -> InvalidInput:
    message = "tools: a schema that the model's spelling of calls cannot be held to"
    allowed += "; or tool_choice auto without strict"
    return InvalidInput(message, seen=seen, allowed=allowed)
