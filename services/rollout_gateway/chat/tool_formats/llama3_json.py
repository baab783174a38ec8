"""Tool calls of Llama 3.1 and later: the response itself is a JSON object, or several with
semicolons between.
"""

from __future__ import annotations

import json

from rollout_gateway.chat.tool_formats.base import IdSource, SpelledCall, openai_call_id
from rollout_gateway.chat.tool_formats.growing import GrowingText, Reading
from rollout_gateway.chat.tool_formats.json_text import call_object

_TAG = "<|python_tag|>"


class Llama3Json:
    """`{"name": ..., "parameters": {...}}` at the start of the response or after `<|python_tag|>`.

    Parameters are required: without a marker of its own, `{"name": "Ada"}` may as well be an answer
    in JSON.
    """

    name = "llama3_json"
    special_tokens: tuple[str, ...] = (_TAG,)
    markers: tuple[str, ...] = (_TAG,)
    at_start: tuple[str, ...] = ("{",)
    after_calls: tuple[str, ...] = (";", "{")

    def read(self, text: GrowingText) -> Reading[list[SpelledCall]]:
        for before in (";", _TAG):
            if (yield from text.at(before)):
                text.take(len(before))
                yield from text.blanks()
        return [(yield from call_object(text, ("parameters", "arguments"), required=True))]

    def beginning(self, name: str = "") -> str:
        named = f' {json.dumps(name, ensure_ascii=False)}, "parameters":' if name else ""
        return f'{{"name":{named}'

    def call_id(self, digits: IdSource) -> str:
        return openai_call_id(digits)
