"""Tools that a model can call in the built-in environment: their type, the built-in tool `python`
and the execution of a call.

A tool's answer is text for the model. A fault of the model also becomes an answer; a failing
sandbox does not.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.services.rollout_gateway.chat.messages import ToolCall
from paceline.services.rollout_gateway.sandbox import Sandbox, SandboxResult
from paceline.whole_text import is_whole, whole_text

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
    return Tool(
        "python",
        "Runs a Python program and returns what it prints. Each call starts anew; there is no "
        "network, and no package beyond the standard library.",
        {"type": "object", "properties": {"code": code}, "required": ["code"]},
        run,
    )


def shown(result: SandboxResult, wall_s: float) -> str:
    """A run's output and errors for the model, and the reason of an early end."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    match result.reason:
        case "timeout":
            parts.append(f"[stopped: it ran longer than {wall_s:g} s]")
        case "cpu":
            parts.append("[stopped: it used too much CPU time]")
        case "memory":
            parts.append("[stopped: it used too much memory]")
        case "killed":
            parts.append(f"[ended by signal {-result.exit_code}]")
        case "exit" if result.exit_code:
            parts.append(f"[exit code {result.exit_code}]")
    if result.truncated:
        parts.append("[output was cut]")
    return "\n".join(part for part in parts if part) or "[no output]"


def schema(tool: Tool) -> dict[str, Any]:
    """The tool's description in the format of chat templates and OpenAI's API."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
        },
    }


async def answer(call: ToolCall, tools: Mapping[str, Tool]) -> str:
    """The answer to a call, at most MAX_ANSWER_CHARACTERS plus a note. Raises Unavailable."""
    try:
        if call.name not in tools:
            raise ToolError(
                f"there is no tool {call.name!r}; there are: {', '.join(tools) or 'none'}"
            )
        tool = tools[call.name]
        return shortened(await tool.answer(_arguments(call.arguments)))
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
