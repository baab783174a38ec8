"""Renders conversations by the model's chat template, and the text after a message with recorded
tokens.

Templates are untrusted Jinja and run in its sandbox. TextCodec handles tokens.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import ConfigError, InvalidInput
from paceline.models.reading import DEFAULT, TOOL_USE, TextFiles
from paceline.services.rollout_gateway.chat.messages import ChatRequest, Message

_MARK = "Pacelineturn" + "".join(secrets.choice(string.ascii_lowercase) for _ in range(20))
"""Letters only, so that no template strips or splits it; random per process, so that no message
contains it.
"""
_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Errors of a template that cannot render its messages."""


class _Generation(Extension):
    """`{% generation %}` marks a model's answer for other trainers' loss masks; here only its
    content matters.
    """

    tags = {"generation"}  # noqa: RUF012  # the base class has it so

    def parse(self, parser: Parser) -> nodes.Node:
        next(parser.stream)
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(inside)  # its variables stay inside, as in transformers


class ChatTemplate:
    """One template of one model."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """`tokens`: special tokens by name, bos_token, ... Raises jinja2.TemplateSyntaxError."""
        self.source = source
        self._tokens = dict(tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(source)

    def render(self, request: ChatRequest) -> str:
        """The conversation up to the model's answer.

        Raises InvalidInput when the template refuses it.
        """
        return self._render(request.messages, request.tools)

    def after(self, request: ChatRequest, index: int) -> str | None:
        """The template's text after the content of the assistant's message `index`; None if it
        hides the message.

        A mark replaces the message: the answer's tokens are recorded, and only the text after it is
        needed. The end of the turn (such as `<|im_end|>`) is first; a caller with that token in the
        answer skips it. A template may refuse a message without its tool calls; the result is then
        also None.
        """
        messages = list(request.messages)
        messages[index] = replace(messages[index], content=_MARK, reasoning="", tool_calls=())
        try:
            text = self._render(messages, request.tools)
        except InvalidInput:
            return None
        return text.partition(_MARK)[2] if text.count(_MARK) == 1 else None

    def _render(self, messages: Iterable[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        given = list(messages)
        try:
            return self._written([message.for_template() for message in given], tools)
        except TypeError:  # DeepSeek's templates concatenate arguments as text
            spelled = [message.shown() for message in given]
        except _REFUSALS as error:
            raise _refused(error) from error
        try:
            return self._written(spelled, tools)
        except _REFUSALS as error:
            raise _refused(error) from error

    def _written(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> str:
        return self._template.render(
            messages=messages,
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=True,
            **self._tokens,
        )


class ChatTemplates:
    """The templates of one model; false for a model without one."""

    def __init__(self, files: TextFiles) -> None:
        """Raises ConfigError for an unreadable template."""
        self._files = files
        self._read = {
            files.templates[name]: self._parsed(files.templates[name])
            for name in (DEFAULT, TOOL_USE)
            if name in files.templates
        }

    def _parsed(self, source: str) -> ChatTemplate:
        try:
            return ChatTemplate(source, self._files.named)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the chat template of {self._files.directory} cannot be read: {error}"
            ) from error

    def __bool__(self) -> bool:
        return bool(self._files.templates)

    @property
    def source(self) -> str:
        """Text of the template for conversations with tools; empty without one."""
        templates = self._files.templates
        return templates.get(TOOL_USE) or templates.get(DEFAULT, "")

    def chosen(self, request: ChatRequest) -> ChatTemplate:
        """The template that transformers would choose: tool_use if there are tools and such a
        template, else default. Raises InvalidInput without one.
        """
        return self._read[self._files.template(tools=bool(request.tools))]

    def render(self, request: ChatRequest) -> str:
        """As ChatTemplate.render of the chosen template."""
        return self.chosen(request).render(request)

    def after(self, request: ChatRequest, index: int) -> str | None:
        """As ChatTemplate.after of the chosen template."""
        return self.chosen(request).after(request, index)


def _refused(error: Exception) -> InvalidInput:
    return InvalidInput(f"messages: the chat template refused them: {error}")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
