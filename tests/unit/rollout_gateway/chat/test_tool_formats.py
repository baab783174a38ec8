"""Every format reads its models' output and rejects other text; examples follow the published
formats.
"""

from __future__ import annotations

import itertools
import re

import pytest

from paceline.services.rollout_gateway.chat.messages import Message, joined
from paceline.services.rollout_gateway.chat.parse import ChatParser
from paceline.services.rollout_gateway.chat.tool_formats.families import (
    TOOL_FORMATS,
    tool_format,
)

WEATHER = ("get_weather", '{"city": "Zürich", "days": 2}')
TIME = ("get_time", "{}")

WELL_FORMED: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # format, response, content, calls
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>',
        "",
        [WEATHER],
    ),
    ("hermes", '<tool_call>{"name":"get_time","arguments":{}}</tool_call>', "", [TIME]),
    ("hermes", '<tool_call>\n{"arguments": {}, "name": "get_time"}\n</tool_call>', "", [TIME]),
    ("hermes", '<tool_call>\n{"name": "get_time"}\n</tool_call>', "", [TIME]),
    ("hermes", '<tool_call>\n{"name": "get_time", "parameters": {}}\n</tool_call>', "", [TIME]),
    (
        "hermes",
        'Both.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n',
        "Both.",
        [WEATHER, TIME],
    ),
    ("hermes", 'A <tool_call>{"name": "get_time"}</tool_call> B <b> ', "AB <b> ", [TIME]),
    (
        "hermes",
        '<tool_call>{"name": "say", "arguments": {"text": "</tool_call><tool_call>"}}</tool_call>',
        "",
        [("say", '{"text": "</tool_call><tool_call>"}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "a\\u00e4", "arguments": {"b": [1.50, -0, 1e9]}}</tool_call>',
        "",
        [("aä", '{"b": [1.50, -0, 1e9]}')],
    ),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}',
        "",
        [WEATHER],
    ),
    ("llama3_json", '<|python_tag|>{"name": "get_time", "parameters": {}}', "", [TIME]),
    ("llama3_json", '{"type": "function", "name": "get_time", "parameters": {}}', "", [TIME]),
    ("llama3_json", '{"name": "get_time", "arguments": {}}', "", [TIME]),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}; {"name": "get_time", "parameters": {}}',
        "",
        [WEATHER, TIME],
    ),
    (
        "llama3_json",
        '\n<|python_tag|>{"name": "get_time", "parameters": {}}\n{"name": "get_time", "parameters": {}}\n',
        "",
        [TIME, TIME],
    ),
    (
        "llama3_json",
        'Let me see. <|python_tag|>{"name": "get_time", "parameters": {}}',
        "Let me see.",
        [TIME],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}, {"name": "get_time", '
        '"arguments": {}, "id": "VvvODy9mT"}]',
        "",
        [WEATHER, TIME],
    ),
    ("mistral", 'Yes.[TOOL_CALLS][{"name": "get_time", "arguments": {}}]', "Yes.", [TIME]),
    ("mistral", '[TOOL_CALLS]{"name": "get_time", "arguments": {}}', "", [TIME]),
    (
        "mistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich", "days": 2}[TOOL_CALLS]get_time[ARGS]{}',
        "",
        [WEATHER, TIME],
    ),
    ("mistral", "[TOOL_CALLS]get_time[CALL_ID]VvvODy9mT[ARGS]{}", "", [TIME]),
    ("mistral", '[TOOL_CALLS]get_time{"in": "]["}', "", [("get_time", '{"in": "]["}')]),
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        "I look.",
        [WEATHER],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_time>\n</function>\n</tool_call>\n<tool_call><function=get_time>"
        "</function></tool_call>",
        "",
        [TIME, TIME],
    ),
    ("qwen3_coder", "Now: <function=get_time>\n</function> so", "Now:so", [TIME]),  # tags left out
    (
        "qwen3_coder",
        "<tool_call>\n<function=say>\n<parameter=text>\n\n a\n<tool_call> \n\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [("say", '{"text": "\\n a\\n<tool_call> \\n"}')],
    ),
    (
        "glm45",
        "Both.<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>",
        "Both.",
        [WEATHER, TIME],
    ),
    (
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich</arg_value><arg_key>days"
        "</arg_key><arg_value>2</arg_value></tool_call>",
        "",
        [WEATHER],
    ),
    (
        "deepseek_v3",
        "Both.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Zürich", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>'
        "get_time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Both.",
        [WEATHER, TIME],
    ),
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Zürich", "days": 2}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [WEATHER, TIME],
    ),
    (
        "kimi_k2",
        "Both.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Zürich", "days": 2}<|tool_call_end|><|tool_call_begin|>'
        "functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "Both.",
        [WEATHER, TIME],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Zürich", "days": 2}<|call|>',
        "",
        [WEATHER],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.get_time"
        "<|channel|>commentary json<|message|>{}<|call|>",
        "I look.",
        [TIME],
    ),
    ("harmony", "<|channel|>commentary to=functions.get_time<|message|>{}", "", [TIME]),
]

NO_CALLS = [
    ("hermes", "Use <tool_call> tags."),
    ("hermes", '<tool_call>\n{"name": "get_time", "arguments": {}}\n'),  # never closed
    (
        "hermes",
        '<tool_call>\n{"name": "get_time", "arguments": {"a": 1}\n</tool_call>',
    ),  # a bracket too few
    ("hermes", '<tool_call>\n{"name": "get_time", "arguments": {}}}\n</tool_call>'),  # one too many
    ("hermes", "<tool_call>\n{'name': 'get_time', 'arguments': {}}\n</tool_call>"),
    ("hermes", '<tool_call>\n{"arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>'),
    (
        "hermes",
        '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>',
    ),  # cannot be sent as UTF-8
    ("hermes", '<tool_call>\n{"name": "get_time", "arguments": {"x": NaN}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "get_time", "arguments": {"x": "two\nlines"}}\n</tool_call>'),
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", "</tool_call>"),
    ("hermes", '{"name": "get_time", "arguments": {}}'),
    ("hermes", "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"),  # another format
    ("llama3_json", '{"name": "Ada"}'),  # an answer in JSON
    ("llama3_json", '{"answer": {"name": "f", "parameters": {}}}'),
    ("llama3_json", 'Here: {"name": "get_time", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="rain")'),
    ("llama3_json", '{"name": "get_time", "parameters": {}'),
    ("llama3_json", '; {"name": "get_time", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS][]"),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "get_time", "arguments": {}}',
    ),  # never closed: none of its calls counts
    ("mistral", '[TOOL_CALLS][{"name": "get_time", "arguments": {}}, {"na'),
    ("mistral", "[TOOL_CALLS]get_time"),
    ("mistral", "[TOOL_CALLS]get_time[ARGS]"),
    ("mistral", "[TOOL_CALLS]get_time[ARGS][1]"),
    ("mistral", "[TOOL_CALLS]two words[ARGS]{}"),
    ("mistral", '[{"name": "get_time", "arguments": {}}]'),
    ("qwen3_coder", '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'),
    ("qwen3_coder", "<tool_call>\n<function=get_time>\n</function>\n"),  # never closed
    ("qwen3_coder", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>\n1\n</function></tool_call>"),
    ("qwen3_coder", "<tool_call><function=f>text</function></tool_call>"),
    ("glm45", "<tool_call>get_time"),
    ("glm45", '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'),
    ("glm45", "<tool_call>f<arg_key>a</arg_key></tool_call>"),
    ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    ),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        "[]<|tool_call_end|><|tool_calls_section_end|>",
    ),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ("harmony", "Plain text without a header."),
    ("harmony", "<|channel|>commentary to=functions.f"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>print(1)"),
    ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": 1'),
]


def read(name: str, response: str, template: str = "", forced: str = "") -> Message:
    numbers = itertools.count(1)
    parser = ChatParser(
        tool_format(name, template),
        reasoning=False,
        forced=forced,
        digits=lambda count: f"{next(numbers):0{count}x}",
    )
    return joined([parser.push(response), parser.finish()])


def called(message: Message) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in message.tool_calls]


@pytest.mark.parametrize(("name", "response", "content", "calls"), WELL_FORMED)
def test_calls_are_read_with_the_text_around_them(
    name: str, response: str, content: str, calls: list[tuple[str, str]]
) -> None:
    message = read(name, response)
    assert (message.content, called(message)) == (content, calls)


@pytest.mark.parametrize(("name", "response"), NO_CALLS)
def test_what_is_no_whole_call_is_content_as_it_stands(name: str, response: str) -> None:
    assert read(name, response) == Message("assistant", response)


@pytest.mark.parametrize(
    ("name", "response", "content", "calls"),
    [
        ("hermes", '<tool_call>{"na <tool_call>{"name": "get_time"}</tool_call>', None, []),
        (
            "hermes",
            '<tool_call>{ <tool_call>{"name": "get_time"}</tool_call>',
            "<tool_call>{ ",
            [TIME],
        ),
        ("hermes", '<tool_call><tool_call>{"name": "get_time"}</tool_call>', "<tool_call>", [TIME]),
        ("hermes", '<<tool_call>{"name": "get_time"}</tool_call>>', "<>", [TIME]),
        (
            "hermes",
            '<tool_call>{"name": "x\n<tool_call>{"name": "get_time"}</tool_call>',
            '<tool_call>{"name": "x',
            [TIME],
        ),
        ("mistral", "[TOOL_CALLS][[TOOL_CALLS]get_time{}", "[TOOL_CALLS][", [TIME]),
        ("llama3_json", '{"name": "get_time", "parameters": {}}; and more', "; and more", [TIME]),
    ],
)
def test_reading_goes_on_where_a_broken_call_broke(
    name: str, response: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    message = read(name, response)
    assert (message.content, called(message)) == (response if content is None else content, calls)


ONE_CALL = {
    "hermes": '<tool_call>{"name": "f", "arguments": %s}</tool_call>',
    "llama3_json": '{"name": "f", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": %s}]',
    "mistral, named": "[TOOL_CALLS]f[ARGS]%s",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>%s"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3, fenced": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
    "```json\n%s\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    "<|tool_call_argument_begin|>%s<|tool_call_end|><|tool_calls_section_end|>",
    "harmony": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>%s<|call|>",
}
"""A call of f with arguments read as JSON; the other formats write each argument separately."""
OBJECTS = {
    '{"a": 1}': '{"a": 1}',
    r'"{\"a\": 1}"': '{"a": 1}',
    r'" {\"a\": {\"b\": \"}\"}}\n"': '{"a": {"b": "}"}}',
    '"{}"': "{}",
}
NO_OBJECTS = [
    *("null", "[1]", "7", "-1.5", "true", '""', '"as text"', '"[1]"', '"7"', '"null"'),
    *('"{"', r'"{\"a\": 1} and more"', r'"{\"a\": \"\ud83d\"}"', r'"\"{}\""'),
]


def in_pieces(name: str, response: str) -> list[Message]:
    """Parse a response whole, and character by character."""
    found = []
    for pieces in ([response], response):
        parser = ChatParser(
            tool_format(name, ""), reasoning=False, digits=lambda count: "0" * count
        )
        for piece in pieces:
            parser.push(piece)
        parser.finish()
        found.append(parser.message)
    return found


@pytest.mark.parametrize("spelling", ONE_CALL)
@pytest.mark.parametrize("written", OBJECTS)
def test_arguments_are_an_object_also_where_a_string_holds_it(spelling: str, written: str) -> None:
    whole, grown = in_pieces(spelling.split(",")[0], ONE_CALL[spelling] % written)
    assert whole == grown
    assert (whole.content, called(whole)) == ("", [("f", OBJECTS[written])])


@pytest.mark.parametrize("spelling", ONE_CALL)
@pytest.mark.parametrize("written", NO_OBJECTS)
def test_a_call_whose_arguments_are_no_object_is_content(spelling: str, written: str) -> None:
    response = ONE_CALL[spelling] % written
    whole, grown = in_pieces(spelling.split(",")[0], response)
    assert whole == grown
    assert whole.tool_calls == ()
    assert whole.content == response.removesuffix("<|call|>")


def test_ids_look_as_the_templates_of_the_format_want_them() -> None:
    for name, response, _, calls in WELL_FORMED:
        ids = [call.call_id for call in read(name, response).tool_calls]
        form = {
            "mistral": "[0-9a-z]{9}",
            "kimi_k2": r"functions\.\w+:\d",
        }.get(name, "call_[0-9a-f]{24}")
        assert all(re.fullmatch(form, call_id) for call_id in ids)
        assert len(set(ids)) == len(calls)


@pytest.mark.parametrize("length", [9, 24])
def test_ids_differ_without_an_injected_source(length: int) -> None:
    ids = set()
    for _ in range(50):
        parser = ChatParser(
            tool_format("mistral" if length == 9 else "hermes", ""), reasoning=False
        )
        text = "[TOOL_CALLS]f[ARGS]{}" if length == 9 else '<tool_call>{"name": "f"}</tool_call>'
        (call,) = parser.push(text).tool_calls
        ids.add(call.call_id.removeprefix("call_"))
    assert len(ids) == 50
    assert all(re.fullmatch(f"[0-9a-f]{{{length}}}", call_id) for call_id in ids)


@pytest.mark.parametrize(
    ("name", "template", "tool", "beginning", "rest"),
    [
        (
            "hermes",
            "",
            "get_time",
            '<tool_call>\n{"name": "get_time", "arguments":',
            " {}}\n</tool_call>",
        ),
        ("hermes", "", "", '<tool_call>\n{"name":', ' "get_time", "arguments": {}}\n</tool_call>'),
        ("llama3_json", "", "get_time", '{"name": "get_time", "parameters":', " {}}"),
        ("llama3_json", "", "", '{"name":', ' "get_time", "parameters": {}}'),
        (
            "mistral",
            "[TOOL_CALLS] [",
            "get_time",
            '[TOOL_CALLS] [{"name": "get_time", "arguments":',
            " {}}]",
        ),
        ("mistral", "", "", '[TOOL_CALLS][{"name":', ' "get_time", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS]x[ARGS]", "get_time", "[TOOL_CALLS]get_time[ARGS]", "{}"),
        ("mistral", "[TOOL_CALLS]x[ARGS]", "", "[TOOL_CALLS]", "get_time[ARGS]{}"),
        (
            "qwen3_coder",
            "",
            "get_time",
            "<tool_call>\n<function=get_time>",
            "\n</function>\n</tool_call>",
        ),
        ("glm45", "", "get_time", "<tool_call>get_time\n", "</tool_call>"),
        (
            "deepseek_v3",
            "",
            "get_time",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>",
            "{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            "kimi_k2",
            "",
            "get_time",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_time:",
            "0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        ),
        (
            "harmony",
            "",
            "get_time",
            "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>",
            "{}<|call|>",
        ),
    ],
)
def test_a_forced_beginning_and_what_the_model_adds_are_one_call(
    name: str, template: str, tool: str, beginning: str, rest: str
) -> None:
    chosen = tool_format(name, template)
    assert chosen is not None
    assert chosen.beginning(tool) == beginning
    message = read(name, rest, template, forced=beginning)
    assert (message.content, called(message)) == ("", [TIME])


def test_a_forced_name_is_written_as_json() -> None:
    chosen = tool_format("hermes", "")
    assert chosen is not None
    assert called(read("hermes", "{}}</tool_call>", forced=chosen.beginning('a"ä'))) == [
        ('a"ä', "{}")
    ]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        # Qwen2.5 and Qwen3
        (
            '{{- "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>" }}',
            "hermes",
        ),
        # Llama 3.1, Llama 3.2
        (
            "{%- if builtin_tools %}{{- '<|python_tag|>' + tool_call.name + '.call(' }}",
            "llama3_json",
        ),
        ("""{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}""", "llama3_json"),
        (
            '{{- \'Respond in the format {"name": function name, "parameters": dictionary}\' }}',
            "llama3_json",
        ),
        ('{{- "[TOOL_CALLS] [" }}{%- set out = tool_call.function|tojson %}', "mistral"),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral"),
        (
            "{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n<parameter=' }}",
            "qwen3_coder",
        ),
        ("{{- '<tool_call>' + name + '\\n<arg_key>' }}", "glm45"),
        (
            "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}",
            "deepseek_v3",
        ),
        ("{{- '<|tool_calls_section_begin|>' -}}", "kimi_k2"),
        ("{{ '<|im_system|>tool_declare<|im_middle|>' -}}", "kimi_k2"),
        ("{{- '<|start|>assistant<|channel|>final<|message|>' + text + '<|end|>' }}", "harmony"),
        # formats that are not in the table
        ("{{- '<|message|>' }}", None),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
        ("", None),
    ],
)
def test_the_template_tells_the_format(source: str, name: str | None) -> None:
    found = tool_format("auto", source)
    assert (found and found.name) == name


def test_formats_are_found_by_name() -> None:
    for name in TOOL_FORMATS:
        found = tool_format(name, "")
        assert found is not None
        assert found.name == name
        assert {marker for marker in found.markers if len(marker) > 1} <= set(found.special_tokens)
    assert tool_format("none", "<tool_call>") is None
    guessed = tool_format("auto", "<tool_call>")
    assert guessed is not None
    assert guessed.name == "hermes"
