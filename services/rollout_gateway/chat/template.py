"""Renders conversations by the model's chat template, and the text after a message with recorded
tokens.

Templates are untrusted Jinja and run in its sandbox. TextCodec handles tokens.
"""

import json
import secrets
import string
from dataclasses import replace
from datetime import datetime
from functools import partial

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import ConfigError, InvalidInput
from paceline.models.reading import DEFAULT, TOOL_USE, TextFiles
from paceline.services.rollout_gateway.chat.messages import ChatRequest

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


class ChatTemplates:
    """The templates of one model."""

    def __init__(self, files: TextFiles) -> None:
        """Raises ConfigError for an unreadable template."""
        self._files = files
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        sources = [files.templates[name] for name in (DEFAULT, TOOL_USE) if name in files.templates]
        try:
            self._read = {source: environment.from_string(source) for source in sources}
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the chat template of {files.directory} cannot be read: {error}"
            ) from error

    @property
    def source(self) -> str:
        """Text of the template for conversations with tools; empty without one."""
        templates = self._files.templates
        return templates.get(TOOL_USE) or templates.get(DEFAULT, "")

    def render(self, request: ChatRequest) -> str:
        """The conversation up to the model's answer, by the template that transformers would
        choose: tool_use if there are tools and such a template, else default.

        Raises InvalidInput without a template, and when the template refuses the conversation.
        """
        template = self._read[self._files.template(tools=bool(request.tools))]
        write = partial(
            template.render,
            tools=list(request.tools) or None,
            documents=None,
            add_generation_prompt=True,
            **self._files.named,
        )
        try:
            try:
                return write(messages=[one.shown(parsed=True) for one in request.messages])
            except TypeError:  # DeepSeek's templates concatenate arguments as text
                return write(messages=[one.shown() for one in request.messages])
        except _REFUSALS as error:
            raise InvalidInput(f"messages: the chat template refused them: {error}") from error

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
            text = self.render(replace(request, messages=tuple(messages)))
        except InvalidInput:
            return None
        return text.partition(_MARK)[2] if text.count(_MARK) == 1 else None


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
