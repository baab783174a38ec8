"""Chat templates in the styles of common model families, each as a model directory with a tiny
tokenizer.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizer_families import add_bos, byte_level, metaspace
from tokenizers import Tokenizer

from paceline.services.rollout_gateway.chat.text import TextCodec

PLAIN = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"

CHATML = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\nCall one as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'user' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Thoughts stay only after the last question.
THINKING = """
{%- if tools %}
{{- '<|im_start|>system\\n# Tools' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
{%- if message.role == 'assistant' %}
{%- set said = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- if message.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- said }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{%- else %}{{- message.content }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

HEADERS = """
{{- bos_token }}
{%- for tool in tools or [] %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
{%- for message in messages %}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{%- endif %}
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- (message.tool_calls[0].function.arguments | tojson) + '}' }}
{%- else %}{{- message.content | trim }}{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# The system prompt moves to the last question, and roles have to alternate.
INSTRUCT = """
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content + '\\n\\n' %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}
{%- set ns = namespace(turn=0, last=-1) %}
{%- for message in rest %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.turn % 2 == 0) %}
{{- raise_exception('roles must alternate user and assistant') }}
{%- endif %}
{%- set ns.turn = ns.turn + 1 %}
{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in rest %}
{%- if message.role == 'user' %}
{{- '[INST] ' + (system if loop.index0 == ns.last else '') + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + '}[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}' }}
{{- ', ' if not loop.last else ']' }}
{%- endfor %}
{{- eos_token }}
{%- else %}{{- ' ' + message.content + eos_token }}{%- endif %}
{%- endfor %}
"""


@dataclass(frozen=True)
class ChatModel:
    """A model family's template and its properties."""

    name: str
    template: str
    end: str  # special token at the end of the model's turn
    rewrites: bool = False  # the template renders past messages differently from new messages
    bos: str = ""

    @functools.cached_property
    def codec(self) -> TextCodec:
        special = sorted({self.bos, self.end, *SPECIAL[self.name]} - {""})
        tokenizer = metaspace(special, "first") if self.name == "instruct" else byte_level(special)
        if self.name == "plain":
            add_bos(tokenizer, self.bos)
        settings = {"chat_template": self.template, "bos_token": self.bos, "eos_token": self.end}
        return codec_of(tokenizer, **settings)

    @functools.cached_property
    def vocab_size(self) -> int:
        return vocab_size(self.codec)

    @property
    def end_id(self) -> int:
        (token,) = self.codec.encode_piece(self.end)
        return token


SPECIAL = {
    "plain": (),
    "chatml": ("<|im_start|>", "<|endoftext|>"),
    "thinking": ("<|im_start|>", "<|endoftext|>"),
    "headers": ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    "instruct": ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
}
MODELS = (
    ChatModel("plain", PLAIN, "<eos>", bos="<bos>"),
    ChatModel("chatml", CHATML, "<|im_end|>"),
    ChatModel("thinking", THINKING, "<|im_end|>", rewrites=True),
    ChatModel("headers", HEADERS, "<|eot_id|>", bos="<|begin_of_text|>"),
    ChatModel("instruct", INSTRUCT, "</s>", rewrites=True, bos="<s>"),
)


def codec_of(tokenizer: Tokenizer, end_ids: Sequence[int] = (), **settings: str) -> TextCodec:
    """A codec read from a model directory; the model ends answers with `end_ids`."""
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save(str(Path(directory) / "tokenizer.json"))
        (Path(directory) / "tokenizer_config.json").write_text(
            json.dumps(settings), encoding="utf-8"
        )
        return TextCodec(Path(directory), end_ids)


def vocab_size(codec: TextCodec) -> int:
    """Number of ids that decode."""
    return int(codec._tokenizer.get_vocab_size(with_added_tokens=True))
