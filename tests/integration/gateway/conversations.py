"""A model that holds conversations, for tests of the chat APIs: a template that shows tools, and
scripted replies.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% if tools %}[tools]{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call> to call one.<eos>\n{% endif %}'
    "{% for message in messages %}[{{ message.role }}] "
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% "
    "endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
"""ChatML's form with the demo's end token, Hermes' tool calls and thinking."""

SPEAK = r"<eos>\n\[assistant\] "
REPLIES = [
    {"pattern": r'"name":$', "texts": [' "weather", "arguments": {"city": "Bern"}}\n</tool_call>']},
    {"pattern": r'"weather", "arguments":$', "texts": [' {"city": "Bern"}}\n</tool_call>']},
    {
        "pattern": rf"weather in Oslo\?{SPEAK}$",
        "texts": [
            'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo",  "days": 1.0}}\n</tool_call>'
            '\n<tool_call>\n{"arguments": {"city": "Bodø"}, "name": "weather"}\n</tool_call>'
        ],
    },
    {"pattern": rf"(rain|sun|Error: no such city){SPEAK}$", "texts": ["It is wet in Oslo."]},
    {"pattern": rf"think about it{SPEAK}$", "texts": ["<think>\nTwo and two.\n</think>\n\nFour."]},
    {"pattern": rf"sure\?{SPEAK}$", "texts": ["Yes, I am."]},
    {"pattern": rf"count{SPEAK}$", "texts": ["one two three four"]},
    {"pattern": rf"count{SPEAK}one two$", "texts": [" and three"]},
    {"pattern": rf"nothing{SPEAK}$", "texts": [""]},
    {"pattern": rf"throw{SPEAK}$", "texts": ["heads", "tails"]},
    {"pattern": SPEAK, "texts": ["Hello, I am here."]},
]
"""The scripted model's answers, by the end of the prompt."""

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
    "required": ["city"],
}
"""Arguments of the tool `weather`."""


NAMING = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
)
"""The demo's template, preceded by the names of the tools."""


def naming_tokenizer(model_dir: Path, directory: Path) -> str:
    """A directory with the tokenizer of a model and a template that names the tools."""
    directory.mkdir(parents=True)
    shutil.copy(model_dir / "tokenizer.json", directory)
    settings = json.loads((model_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
    text = json.dumps({**settings, "chat_template": NAMING})
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return str(directory)


def teach(model_dir: Path, script: dict[str, Any]) -> None:
    """Writes the template to the model directory and the replies to the engine's script."""
    path = model_dir / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    script["replies"] = REPLIES
