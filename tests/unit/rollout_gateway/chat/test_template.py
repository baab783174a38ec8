"""Templates are foreign code: they may hide, repeat, reject or fail without harm to a dialogue."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from chat_models import CHATML, HEADERS, INSTRUCT, MODELS, THINKING, ChatModel
from transformers.utils.chat_template_utils import render_jinja_template

from paceline.errors import ConfigError, InvalidInput
from paceline.models.reading import TextFiles, read_text
from paceline.services.rollout_gateway.chat import text as template_module
from paceline.services.rollout_gateway.chat.messages import ChatRequest, Message, ToolCall
from paceline.services.rollout_gateway.chat.text import ChatTemplates

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = ToolCall("abcdefghi", "add", '{"a": 12, "b": "<ü>"}')
TALK = (
    Message("system", "Be exact."),
    Message("user", "12+30="),
    Message("assistant", "", reasoning="a tool does it", tool_calls=(CALL,)),
    Message("tool", "42", tool_call_id=CALL.call_id),
    Message("assistant", "It is 42."),
    Message("user", "and now?"),
)
ABC = ChatRequest((Message("user", "a"), Message("assistant", "b"), Message("user", "c")))


def template(source: str) -> ChatTemplates:
    return ChatTemplates(TextFiles(Path(), {}, TOKENS, {"default": source}))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("tools", [(), (ADD,)], ids=["no tools", "tools"])
@pytest.mark.parametrize("count", [2, 4, 6])
def test_a_conversation_is_rendered_as_transformers_does(
    model: ChatModel, tools: tuple[dict[str, object], ...], count: int
) -> None:
    request = ChatRequest(TALK[:count], tools)
    (expected,), _ = render_jinja_template(
        [[message.shown(parsed=True) for message in request.messages]],
        tools=list(tools) or None,
        chat_template=model.template,
        add_generation_prompt=True,
        **TOKENS,
    )
    assert template(model.template).render(request) == expected


@pytest.mark.parametrize("source", [CHATML, THINKING, HEADERS])
@pytest.mark.parametrize("index", [2, 4])
def test_what_follows_a_message_is_the_end_of_the_rendering(source: str, index: int) -> None:
    request = ChatRequest(TALK, (ADD,))
    after = template(source).after(request, index)
    assert after is not None
    assert after.startswith(("<|im_end|>\n", "<|eot_id|>"))
    assert template(source).render(request).endswith(after)


def test_a_refusal_of_the_message_without_its_tool_calls_hides_it() -> None:
    request = ChatRequest(TALK)
    assert template(INSTRUCT).render(request)
    assert template(INSTRUCT).after(request, 2) is None  # two answers in a row, as it sees them
    assert template(INSTRUCT).after(request, 4) == "</s>[INST] Be exact.\n\nand now?[/INST]"


@pytest.mark.parametrize(
    ("source", "after"),
    [
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", "><c>"),
        ("{% for m in messages %}<{{ m.content | trim | capitalize }}>{% endfor %}", "><C>"),
        ("{% for m in messages %}<{{ m.content }}{{ m.content }}>{% endfor %}", None),
        ("{% for m in messages if m.role == 'user' %}<{{ m.content }}>{% endfor %}", None),
        ("{% for m in messages %}<{{ m.content[:3] }}>{% endfor %}", None),
        ("{% for m in messages %}<{{ m.content | upper }}>{% endfor %}", None),
        ("{% for m in messages %}<{{ m.content | reverse }}>{% endfor %}", None),
        (
            "{% if messages[1].content != 'b' %}{{ raise_exception('b!') }}{% endif %}{{ "
            "messages[1].content }}",
            None,
        ),
        ("nothing of it", None),
    ],
    ids=[
        "plain",
        "strips",
        "repeats",
        "hides",
        "cuts",
        "changes",
        "turns round",
        "refuses",
        "says nothing",
    ],
)
def test_only_a_message_that_shows_once_has_something_after_it(
    source: str, after: str | None
) -> None:
    assert template(source).after(ABC, 1) == after


def test_the_mark_cannot_be_known_and_would_only_hide_the_message() -> None:
    mark = template_module._MARK
    assert len(set(mark[len("Pacelineturn") :])) > 3
    assert mark.isalpha()
    shown = template("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    guessed = ChatRequest((Message("user", mark), *ABC.messages[1:]))
    assert shown.after(guessed, 1) is None
    for beginning in ("Pacelineturn", mark[:-1], mark[1:]):
        request = ChatRequest((Message("user", beginning), *ABC.messages[1:]))
        assert shown.after(request, 1) == "><c>"


def test_names_and_arguments_that_look_like_the_mark_do_not_move_it() -> None:
    shown = template(
        "{{ tools | tojson }}{% for m in messages %}<{{ m.content }}{{ m.tool_calls }}>{% endfor %}"
    )
    call = ToolCall("Pacelineturn", "Pacelineturn", '"Pacelineturn"')
    tool = {"type": "function", "function": {"name": "Pacelineturn"}}
    request = ChatRequest((Message("assistant", "a", tool_calls=(call,)), *ABC.messages), (tool,))
    assert shown.after(request, 2) == "><c>"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ nobody }}|", "|"),
        ("{{ messages[9] }}|", "|"),
        ("{{ messages[0].nothing }}|{{ messages[0].content.nothing }}", "|"),
        ("{% if documents %}x{% endif %}{{ add_generation_prompt }}", "True"),
        ("{% if tools %}x{% endif %}|", "|"),
        ("{{ bos_token }}{{ eos_token }}{{ pad_token }}", "<s></s>"),
        (
            "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content "
            "}}{% endfor %}",
            "a",
        ),
        ("{{ strftime_now('%Y') | length }}", "4"),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
            "abc",
        ),
    ],
)
def test_what_is_not_there_is_empty(source: str, shown: str) -> None:
    assert template(source).render(ABC) == shown


@pytest.mark.parametrize(
    "source",
    [
        "{{ nobody.name }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages | sum }}",
        "{{ nobody | tojson }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 'a'.encode('nowhere') }}",
        "{{ '%d' % 'x' }}",
        "{{ raise_exception('never') }}",
    ],
)
def test_a_template_that_breaks_refuses_the_messages(source: str) -> None:
    broken = template("{% if messages %}" + source + "{% endif %}")
    with pytest.raises(InvalidInput, match="the chat template refused them"):
        broken.render(ABC)
    assert broken.after(ABC, 1) is None


@pytest.mark.parametrize(
    "options", ["", "indent=2", "ensure_ascii=true", "separators=(',', ':')", "sort_keys=true"]
)
def test_tojson_spells_as_pythons_json(options: str) -> None:
    value = {"b": "ü<&'", "a": [1, None, 0.5]}
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson(" + options + ") }}"
    call = ToolCall("1", "f", json.dumps(value))
    found = template(source).render(ChatRequest((Message("assistant", tool_calls=(call,)),)))
    wanted = {
        "ensure_ascii": False,
        **eval(f"dict({options})", {"true": True}),
    }  # the options as Python spells them
    assert found == json.dumps(value, **wanted)


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000, "1" * 5000, "NaN", ""])
def test_arguments_that_are_no_json_stay_text(arguments: str) -> None:
    message = Message("assistant", tool_calls=(ToolCall("1", "f", arguments),))
    shown = message.shown(parsed=True)["tool_calls"][0]["function"]["arguments"]
    assert shown == arguments or arguments == "NaN"
    assert message.digest(b"") == message.digest(b"")


def test_arguments_count_as_values_and_everything_else_as_it_stands() -> None:
    def digest(arguments: str, **change: str) -> bytes:
        calls = (ToolCall(change.pop("call_id", "1"), "f", arguments),)
        return Message("assistant", change.pop("content", ""), tool_calls=calls, **change).digest(
            b""
        )

    assert digest('{"a": 1, "b": 2}') == digest('{"b":2,"a":1}')
    others = [
        digest('{"a": 1}'),
        digest('{"a": "1"}'),
        digest('{"a": 1'),
        digest('{"a": 1}', call_id="2"),
        digest('{"a": 1}', content=" "),
        digest('{"a": 1}', reasoning="x"),
        digest('{"a": 1}', content="x"),
        digest('{"a": 1}', content="\ud800"),
    ]
    assert len(set(others)) == len(others)


def read(directory: Path, **settings: object) -> ChatTemplates:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return ChatTemplates(read_text(directory))


def test_a_template_is_read_from_its_file_first_and_from_a_list_by_name(tmp_path: Path) -> None:
    assert read(tmp_path).source == ""
    assert read(tmp_path, chat_template="one").render(ABC) == "one"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert read(tmp_path, chat_template=several).render(ABC) == "plain"
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert read(tmp_path, chat_template="one").render(ABC) == "file"


def test_a_model_with_named_templates_and_no_default_refuses_a_chat_without_tools(
    tmp_path: Path,
) -> None:
    templates = read(tmp_path, chat_template=[{"name": "tool_use", "template": "tools"}])
    assert templates.render(replace(ABC, tools=(ADD,))) == "tools"
    with pytest.raises(InvalidInput, match="no default chat template; seen: tool_use"):
        templates.render(ABC)


@pytest.mark.parametrize("content", [b"{% if %}", b"{% nothing %}", b"\xff"])
def test_a_template_that_cannot_be_read_is_a_wrong_setting(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize("several", [["default"], [{"template": "x"}], [{"name": "default"}]])
def test_a_list_of_templates_without_names_is_a_wrong_setting(
    tmp_path: Path, several: list[object]
) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path, chat_template=several)


def test_a_template_that_puts_arguments_together_as_text_gets_them_as_text() -> None:
    source = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name + call.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert template(source).render(ChatRequest(TALK)) == 'add{"a": 12, "b": "<ü>"}'
