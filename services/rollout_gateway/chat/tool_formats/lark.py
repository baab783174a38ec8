"""Grammars in llguidance's Lark, written rule by rule. Owns how text, special tokens and JSON are
spelled in one; knows no format of calls.

A tokenizer may have a token of its own for a marker such as <tool_call>. A grammar of text alone
would keep the model from it, so text is spelled with the token beside its characters. Imports no
llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from paceline.services.rollout_gateway.engines.requests.json_schema import FORM

_JSON_WORDS = re.compile(r'"[^"]*"|[{}:,\[\]]| +|[^"{}:,\[\] ]+|"')
"""Text in the words of JSON: where an object may be a call or an answer, words of both have to end
at the same places, for none is read twice.
"""
_GUIDANCE = "x-guidance"
ANY_TEXT = "(?s:.*)"
"""Regular expression of any text."""


class Lark(NamedTuple):
    """An expression of the grammar."""

    text: str


class FreeText(NamedTuple):
    """Text in which nothing is asked for."""

    before: Lark  # of it what ends in a token, so that a text may begin behind it
    whole: Lark
    never: str  # what that may not hold, as the end of a terminal


class Vocabulary(NamedTuple):
    """The tokens of a model that are added to those of its text: markers, and what ends texts."""

    added: Mapping[str, int]  # by text

    def split(self, text: str) -> list[str]:
        """The text cut around added tokens, each a part of its own."""
        found = [token for token in self.added if token in text]
        if not found:
            return [text] if text else []
        longest_first = sorted(found, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        return [part for part in parts if part]


class Rules:
    """One grammar as it grows. Its rules are named by number."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lines: list[str] = []

    def text(self, text: str) -> Lark:
        """Exactly this text; where a token is added for a part of it, as that token or as its
        characters.
        """
        return Lark(" ".join(self._part(part) for part in self._vocabulary.split(text)))

    def json(self, schema: Mapping[str, Any]) -> Lark:
        """JSON of a schema; {}: any object. Its own "x-guidance" is overridden."""
        plain = {key: value for key, value in schema.items() if key != _GUIDANCE}
        if not {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"} & plain.keys():
            plain["type"] = "object"
        plain[_GUIDANCE] = FORM
        return self.rule(f"%json {json.dumps(plain)}")

    def regex(self, expression: str) -> Lark:
        """What a regular expression matches, which is not nothing."""
        return Lark(_slashed(expression))

    def space(self) -> Lark:
        """White space, a little or none."""
        return Lark(r"(/[ \t\r\n]{1,20}/)?")

    def until(self, end: str, without: str, *bodies: str) -> Lark:
        """Text that matches all of `bodies` and does not hold `without`, up to and with `end`."""
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
        """Any text, with the added tokens that are no markers. Only the first marker can be come
        to; the others do not stand in the text.
        """
        closed = {self._vocabulary.added.get(marker) for marker in markers}
        tokens = sorted(set(self._vocabulary.added.values()) - closed)
        never = "".join(
            f" & ~{_slashed(f'{ANY_TEXT}{_escaped(marker)}{ANY_TEXT}')}" for marker in markers[1:]
        )
        name = self._name("TEXT")
        self._lines.append(f"{name}: /(?s:.+)/{never}")
        # A text is never cut but by a token: behind a cut it might go on to what it may not hold.
        before = self.rule(f"({name}? <[{','.join(map(str, tokens))}]>)*") if tokens else Lark("")
        return FreeText(before, self.sequence([before, Lark(f"{name}?")]), never)

    def behind(self, marker: str, body: str) -> Lark:
        """A marker, behind text that matches or nothing."""
        ended = self._name("ended")
        self._lines.append(f"{ended}[lazy]: /({_slashed(body)[1:-1]})?/ {_quoted(marker)}")
        found = [Lark(ended)]
        if marker in self._vocabulary.added:
            token = f"<[{self._vocabulary.added[marker]}]>"
            found += [Lark(f"{_slashed(body)} {token}"), Lark(token)]
        return self.either(found)

    def up_to(self, marker: str, free: FreeText) -> Lark:
        """Free text up to and with a marker, spelled either way."""
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
        """A rule of its own."""
        name = self._name("part")
        self._lines.append(f"{name}: {body}")
        return Lark(name)

    def sequence(self, parts: Iterable[Lark]) -> Lark:
        """One behind the other."""
        return Lark(" ".join(part.text for part in parts if part.text))

    def either(self, parts: Iterable[Lark]) -> Lark:
        """One of them."""
        return self.rule(" | ".join(part.text or '""' for part in parts))

    def grammar(self, start: Lark) -> str:
        """The whole of it."""
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
