"""Makes a tool of a user's function. The model reads its docstring and annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.errors import PydanticUserError

from paceline.errors import ConfigError
from paceline.plugins import find_variant
from paceline.services.rollout_gateway.environments.tools import Tool, ToolError
from paceline.telemetry import get_logger

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
            raise ToolError(_first(error)) from error
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


def _first(error: ValidationError) -> str:
    """The first fault of the arguments, as a message to the model."""
    one = error.errors()[0]
    where = ".".join(map(str, one["loc"])) or "the arguments"
    return f"{where}: {one['msg']}"
