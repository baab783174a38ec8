"""Tools that a model can call: their type, the built-in tool `python`, and a user's own functions.

A tool's answer is text for the model. A fault of the model also becomes an answer; a failing
sandbox does not.
"""

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.errors import PydanticUserError

from paceline.errors import ConfigError, is_whole, whole_text
from paceline.plugins import find_variant
from paceline.services.rollout_gateway.chat.messages import ToolCall
from paceline.services.rollout_gateway.sandbox import Sandbox
from paceline.services.rollout_gateway.sandbox.launcher.request import SandboxResult
from paceline.telemetry import get_logger

MAX_ANSWER_CHARACTERS = 8000


class ToolError(Exception):
    """A fault of the model; the message is the tool's answer to it."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    answer: Callable[[Any], Awaitable[str]]
    """Takes the parsed arguments, of any JSON type. Raises ToolError, or Unavailable when a
    resource of the tool is missing.
    """


def python(sandbox: Sandbox) -> Tool:
    """The tool that runs Python programs in the sandbox, each call in a fresh process."""

    async def run(values: Any) -> str:
        if not isinstance(values, dict) or not isinstance(values.get("code"), str):
            raise ToolError("the arguments must be a JSON object with the text 'code'")
        return shown(await sandbox.run(values["code"]), sandbox.config.wall_s)

    code = {"type": "string", "description": "The whole program; print what you want to see"}
    form = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    about = "Runs a Python program and returns what it prints. Each call starts anew; there is no "
    about += "network, and no package beyond the standard library."
    return Tool("python", about, form, run)


def shown(result: SandboxResult, wall_s: float) -> str:
    """A run's output and errors for the model, and the reason of an early end."""
    ends = {
        "timeout": f"[stopped: it ran longer than {wall_s:g} s]",
        "cpu": "[stopped: it used too much CPU time]",
        "memory": "[stopped: it used too much memory]",
        "killed": f"[ended by signal {-result.exit_code}]",
        "exit": f"[exit code {result.exit_code}]" if result.exit_code else "",
    }
    cut = "[output was cut]" if result.truncated else ""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n"), ends[result.reason], cut]
    return "\n".join(part for part in parts if part) or "[no output]"


def schema(tool: Tool) -> dict[str, Any]:
    """The tool's description in the format of chat templates and OpenAI's API."""
    about = {"name": tool.name, "description": tool.description}
    return {"type": "function", "function": {**about, "parameters": dict(tool.parameters)}}


async def answer(call: ToolCall, tools: Mapping[str, Tool]) -> str:
    """The answer to a call, at most MAX_ANSWER_CHARACTERS plus a note. Raises Unavailable."""
    try:
        if call.name not in tools:
            known = ", ".join(tools) or "none"
            raise ToolError(f"there is no tool {call.name!r}; there are: {known}")
        return shortened(await tools[call.name].answer(_arguments(call.arguments)))
    except ToolError as error:
        return shortened(f"error: {error}")


def shortened(text: str) -> str:
    """Shorten a long text to its beginning and end, where a program's result usually is.
    `whole_text` repairs the text.
    """
    text = whole_text(text)
    if len(text) <= MAX_ANSWER_CHARACTERS:
        return text
    half = MAX_ANSWER_CHARACTERS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def _arguments(text: str) -> Any:
    try:
        found = json.loads(text)
        whole = is_whole(json.dumps(found, ensure_ascii=False))
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not JSON: {error}") from error
    if not whole:  # an escaped half pair, which no program, server or template can receive
        raise ToolError("the arguments hold half of a surrogate pair")
    return found


log = get_logger(__name__)
_FORM = "a function whose parameters are annotated and whose docstring says what it does"


def own_tool(name: str, path: str) -> Tool:
    """Make the tool `name` from the function at an import path.

    The function may be a coroutine. The model gets its result as text, or its exception as an
    error. Raises ConfigError for a path that cannot be imported or is no such function.
    """
    function: Any = find_variant(path, {}, "tool")
    if not inspect.isroutine(function):
        raise ConfigError("a tool is no function", seen=path, allowed=_FORM)
    model = _parameters(name, path, function)
    schema = model.model_json_schema()
    schema.pop("title", None)

    async def answered(values: Any) -> str:
        try:
            given = model.model_validate(values)
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(map(str, fault["loc"])) or "the arguments"
            raise ToolError(f"{where}: {fault['msg']}") from error
        arguments = {key: getattr(given, key) for key in model.model_fields}
        try:
            found = function(**arguments)
            return str(await found if inspect.isawaitable(found) else found)
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            log.warning("a tool failed", tool=name, error=repr(error))
            raise ToolError(f"{type(error).__name__}: {error}") from error

    return Tool(name, inspect.getdoc(function) or "", schema, answered)


def _parameters(name: str, path: str, function: Callable[..., Any]) -> type[BaseModel]:
    """A pydantic model of the function's arguments. Raises ConfigError."""
    try:
        hints = get_type_hints(function, include_extras=True)
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise TypeError(f"{parameter} takes any number of arguments")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints[parameter.name], default)
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except (TypeError, ValueError, NameError, KeyError, PydanticUserError) as error:
        message = f"the parameters of a tool cannot be read: {type(error).__name__}: {error}"
        raise ConfigError(message, seen=path, allowed=_FORM) from error
