"""Grammars in llguidance's Lark, built rule by rule: text, special tokens and JSON, without any
call format.

A tokenizer may have a token for a marker such as <tool_call>. A grammar of text alone would exclude
that token, so text may also be written as the token. Imports no llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from paceline.services.rollout_gateway.engines.requests.structures import FORM

_JSON_WORDS = re.compile(r'"[^"]*"|[{}:,\[\]]| +|[^"{}:,\[\] ]+|"')
"""Text in the words of JSON. If an object may be a call or an answer, words of both must end at the
same places, since no text is read twice.
"""
_GUIDANCE = "x-guidance"
ANY_TEXT = "(?s:.*)"
"""Regular expression of any text."""


class Lark(NamedTuple):
    """An expression of the grammar."""

    text: str


class FreeText(NamedTuple):
    """Unconstrained text."""

    before: Lark  # the part that ends in a token, after which a text may begin
    whole: Lark
    never: str  # text that it may not contain, as the end of a terminal


class Vocabulary(NamedTuple):
    """A model's added tokens: markers, and ends of texts."""

    added: Mapping[str, int]  # by text

    def split(self, text: str) -> list[str]:
        """The text cut around added tokens; each added token is a part."""
        found = [token for token in self.added if token in text]
        if not found:
            return [text] if text else []
        longest_first = sorted(found, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        return [part for part in parts if part]


class Rules:
    """One growing grammar, with numbered rules."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lines: list[str] = []

    def text(self, text: str) -> Lark:
        """Exactly this text; a part with an added token may be that token or its characters."""
        return Lark(" ".join(self._part(part) for part in self._vocabulary.split(text)))

    def json(self, schema: Mapping[str, Any]) -> Lark:
        """JSON of a schema; {}: any object. A schema's "x-guidance" is overridden."""
        plain = {key: value for key, value in schema.items() if key != _GUIDANCE}
        if not {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"} & plain.keys():
            plain["type"] = "object"
        plain[_GUIDANCE] = FORM
        return self.rule(f"%json {json.dumps(plain)}")

    def regex(self, expression: str) -> Lark:
        """Any non-empty match of a regular expression."""
        return Lark(_slashed(expression))

    def space(self) -> Lark:
        """Optional white space of limited length."""
        return Lark(r"(/[ \t\r\n]{1,20}/)?")

    def until(self, end: str, without: str, *bodies: str) -> Lark:
        """Text that matches all of `bodies` and does not contain `without`, up to and including
        `end`.
        """
        first, *rest = self._vocabulary.split(end)
        never = _slashed(f"{ANY_TEXT}{_escaped(without)}{ANY_TEXT}")
        body_name = self._name("TEXT")
        every = " & ".join(map(_slashed, bodies or (ANY_TEXT,)))
        self._lines.append(f"{body_name}: {every} & ~{never}")
        ended = self._name("ended")
        self._lines.append(f"{ended}[lazy]: {body_name} {_quoted(first)}")
        found = Lark(ended)
        if first in self._vocabulary.added:
            token = Lark(f"{body_name} <[{self._vocabulary.added[first]}]>")
            found = self.either([found, token])
        return self.sequence([found, self.text("".join(rest))])

    def free_text(self, markers: Sequence[str]) -> FreeText:
        """Any text, with added tokens that are no markers. Only the first marker may follow it; the
        remaining markers do not occur in it.
        """
        closed = {self._vocabulary.added.get(marker) for marker in markers}
        tokens = sorted(set(self._vocabulary.added.values()) - closed)
        never = "".join(
            f" & ~{_slashed(f'{ANY_TEXT}{_escaped(marker)}{ANY_TEXT}')}" for marker in markers[1:]
        )
        name = self._name("TEXT")
        self._lines.append(f"{name}: /(?s:.+)/{never}")
        # A text is cut only by a token: after another cut it could continue to a forbidden text.
        before = self.rule(f"({name}? <[{','.join(map(str, tokens))}]>)*") if tokens else Lark("")
        return FreeText(before, self.sequence([before, Lark(f"{name}?")]), never)

    def behind(self, marker: str, body: str) -> Lark:
        """A marker after text that matches, or after nothing."""
        ended = self._name("ended")
        self._lines.append(f"{ended}[lazy]: /({_slashed(body)[1:-1]})?/ {_quoted(marker)}")
        found = [Lark(ended)]
        if marker in self._vocabulary.added:
            token = f"<[{self._vocabulary.added[marker]}]>"
            found += [Lark(f"{_slashed(body)} {token}"), Lark(token)]
        return self.either(found)

    def up_to(self, marker: str, free: FreeText) -> Lark:
        """Free text up to and including a marker, as token or characters."""
        body = self._name("TEXT")
        self._lines.append(f"{body}: /{ANY_TEXT}/{free.never}")
        ended = self._name("ended")
        self._lines.append(f"{ended}[lazy]: {body} {_quoted(marker)}")
        found = [self.sequence([free.before, Lark(ended)])]
        if marker in self._vocabulary.added:
            token = Lark(f"<[{self._vocabulary.added[marker]}]>")
            found.append(self.sequence([free.whole, token]))
        return self.either(found)

    def rule(self, body: str) -> Lark:
        """A new rule."""
        name = self._name("part")
        self._lines.append(f"{name}: {body}")
        return Lark(name)

    def sequence(self, parts: Iterable[Lark]) -> Lark:
        """The parts in sequence."""
        return Lark(" ".join(part.text for part in parts if part.text))

    def either(self, parts: Iterable[Lark]) -> Lark:
        """Any of the parts."""
        return self.rule(" | ".join(part.text or '""' for part in parts))

    def grammar(self, start: Lark) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start.text}", *self._lines])

    def _name(self, kind: str) -> str:
        return f"{kind}_{len(self._lines)}"

    def _part(self, part: str) -> str:
        token = self._vocabulary.added.get(part)
        if token is None:
            return " ".join(map(_quoted, _JSON_WORDS.findall(part)))
        return f"({_quoted(part)} | <[{token}]>)"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return re.escape(text).replace("\\\n", "\\n")


def _slashed(expression: str) -> str:
    """A regular expression between slashes."""
    escaped = re.sub(r"\\.|/", lambda found: found[0] if len(found[0]) > 1 else r"\/", expression)
    return f"/{escaped.replace(chr(10), chr(92) + 'n')}/"
