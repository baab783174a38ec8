"""Grammars in llguidance's Lark, built rule by rule: text, special tokens and JSON, without any
call format.

A tokenizer may have a token for a marker such as <tool_call>. A grammar of text alone would exclude
that token, so text may also be written as the token. Imports no llguidance.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NewType

from paceline.services.rollout_gateway.engines.requests.structures import FORM

_JSON_WORDS = re.compile(r'"[^"]*"|[{}:,\[\]]| +|[^"{}:,\[\] ]+|"')
"""Text in the words of JSON. If an object may be a call or an answer, words of both must end at the
same places, since no text is read twice.
"""
_GUIDANCE = "x-guidance"
ANY_TEXT = "(?s:.*)"
"""Regular expression of any text."""
Lark = NewType("Lark", str)
"""An expression of the grammar."""


class FreeText(NamedTuple):
    """Unconstrained text."""

    before: Lark  # the part before a free text; it ends in a token
    whole: Lark
    never: str  # text that it may not contain, as the end of a terminal


class Rules:
    """One growing grammar, with numbered rules."""

    def __init__(self, added: Mapping[str, int]) -> None:
        """`added`: the model's added tokens by text, such as markers and ends of texts."""
        self._added = added
        self._lines: list[str] = []

    def text(self, text: str) -> Lark:
        """Exactly this text; a part with an added token may be that token or its characters."""
        return Lark(" ".join(self._part(part) for part in self._split(text)))

    def json(self, schema: Mapping[str, Any]) -> Lark:
        """JSON of a schema; {}: any object. A schema's "x-guidance" is overridden."""
        plain = {key: value for key, value in schema.items() if key != _GUIDANCE}
        if not {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"} & plain.keys():
            plain["type"] = "object"
        plain[_GUIDANCE] = FORM
        return self._rule(f"%json {json.dumps(plain)}")

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
        first, *rest = self._split(end)
        every = " & ".join(map(_slashed, bodies or (ANY_TEXT,)))
        body = self._add("TEXT", f"{every}{_excluding([without])}")
        return self.sequence([self._ended(first, body, [body]), self.text("".join(rest))])

    def free_text(self, markers: Sequence[str]) -> FreeText:
        """Any text, with added tokens that are no markers. Only the first marker may follow it; the
        remaining markers do not occur in it.
        """
        tokens = sorted(set(self._added.values()) - {self._added.get(one) for one in markers})
        never = _excluding(markers[1:])
        name = self._add("TEXT", f"/(?s:.+)/{never}")
        # A text is cut only by a token: after another cut it could continue to a forbidden text.
        before = self._rule(f"({name}? <[{','.join(map(str, tokens))}]>)*") if tokens else Lark("")
        return FreeText(before, self.sequence([before, Lark(f"{name}?")]), never)

    def behind(self, marker: str, body: str) -> Lark:
        """A marker after text that matches, or after nothing."""
        texts = [self.regex(body), Lark("")]
        return self._ended(marker, Lark(f"/({_slashed(body)[1:-1]})?/"), texts)

    def up_to(self, marker: str, free: FreeText) -> Lark:
        """Free text up to and including a marker, as token or characters."""
        body = self._add("TEXT", f"/{ANY_TEXT}/{free.never}")
        return self._ended(marker, body, [free.whole], free.before)

    def sequence(self, parts: Iterable[str]) -> Lark:
        """The parts in sequence."""
        return Lark(" ".join(filter(None, parts)))

    def either(self, parts: Iterable[Lark]) -> Lark:
        """Any of the parts."""
        return self._rule(" | ".join(part or '""' for part in parts))

    def any_number(self, part: Lark, most: int | None = None) -> Lark:
        """The part repeatedly, or not at all; `most`: largest number of repetitions."""
        return Lark(f"({part})*" if most is None else f"({part}){{0,{most}}}")

    def grammar(self, start: Lark) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._lines])

    def _ended(self, end: str, body: Lark, texts: Sequence[Lark], before: str = "") -> Lark:
        """`end` as characters at its first place after `before` and `body`, or as a token after one
        of `texts`.
        """
        found = [self.sequence([before, self._add("ended", f"{body} {quoted(end)}", "[lazy]")])]
        if end in self._added:
            token = Lark(f"<[{self._added[end]}]>")
            found += [self.sequence([text, token]) for text in texts]
        return self.either(found)

    def _rule(self, body: str) -> Lark:
        return self._add("part", body)

    def _add(self, kind: str, body: str, mode: str = "") -> Lark:
        name = f"{kind}_{len(self._lines)}"
        self._lines.append(f"{name}{mode}: {body}")
        return Lark(name)

    def _split(self, text: str) -> list[str]:
        """The text cut around added tokens; each added token is a part."""
        found = sorted((one for one in self._added if one in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, found))})", text) if found else [text]
        return [part for part in parts if part]

    def _part(self, part: str) -> str:
        token = self._added.get(part)
        if token is None:
            return " ".join(map(quoted, _JSON_WORDS.findall(part)))
        return f"({quoted(part)} | <[{token}]>)"


def quoted(value: object) -> str:
    """The value as JSON."""
    return json.dumps(value, ensure_ascii=False)


def _excluding(texts: Sequence[str]) -> str:
    """End of a terminal that contains none of these texts."""
    escaped = (re.escape(text).replace("\\\n", "\\n") for text in texts)
    return "".join(f" & ~{_slashed(f'{ANY_TEXT}{one}{ANY_TEXT}')}" for one in escaped)


def _slashed(expression: str) -> str:
    """A regular expression between slashes."""
    escaped = re.sub(r"\\.|/", lambda found: found[0] if len(found[0]) > 1 else r"\/", expression)
    return f"/{escaped.replace(chr(10), chr(92) + 'n')}/"
