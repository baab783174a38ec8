"""Tool calls of Llama 3.1 and later: the response itself is a JSON object, or several with
semicolons between.
"""

from __future__ import annotations

from paceline.services.rollout_gateway.chat.tool_formats.base import (
    CallFrame,
    Calls,
    Offered,
    Piece,
    SpelledCall,
    ToolFormat,
    call_beginning,
    call_pieces,
)
from paceline.services.rollout_gateway.chat.tool_formats.growing import GrowingText, Reading
from paceline.services.rollout_gateway.chat.tool_formats.json_text import call_object
from paceline.services.rollout_gateway.chat.tool_formats.lark import Lark, Rules

_TAG = "<|python_tag|>"
_NO_BRACE = r"[ \t\r\n]*[^{ \t\r\n](?s:.*)"
"""Text that does not begin with a brace."""


class Llama3Json(ToolFormat):
    """`{"name": ..., "parameters": {...}}` at the start of the response or after `<|python_tag|>`.

    Parameters are required: without a marker, `{"name": "Ada"}` may also be a JSON answer.
    """

    name = "llama3_json"
    special_tokens = (_TAG,)
    markers = (_TAG,)
    at_start = ("{",)
    after_calls = (";", "{")
    frame = CallFrame(between="; ")

    def read(self, text: GrowingText) -> Reading[list[SpelledCall]]:
        for before in (";", _TAG):
            if (yield from text.at(before)):
                text.take(len(before))
                yield from text.blanks()
        return [(yield from call_object(text, ("parameters", "arguments"), required=True))]

    def spelled(self, tool: Offered, rules: Rules) -> list[Piece]:
        return call_pieces(tool, rules, "parameters")

    def woven(self, rules: Rules, calls: Calls, answer: Lark | None = None) -> Lark:
        """Calls if the response begins with a brace or has the tag."""
        called = rules.sequence([rules.space(), calls(rules, "")])
        if answer is not None:
            return rules.either([called, answer])
        said = rules.regex(_NO_BRACE)
        tagged = rules.sequence([rules.behind(_TAG, _NO_BRACE), calls(rules, "")])
        return rules.either([called, tagged, said, rules.space()])

    def beginning(self, name: str = "") -> str:
        return call_beginning(name, "parameters")
