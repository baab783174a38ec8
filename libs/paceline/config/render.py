"""Prints a settings tree as TOML text with masked secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from paceline.config.base import Config
from paceline.config.shared import SHARED_SECTIONS
from paceline.errors import ConfigError

MASK = "****"
_URL_PASSWORD = re.compile(r"(?<=://)([^/@\s]*):([^/@\s]*)@")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def print_config(config: Config, section: str) -> str:
    """TOML that `load_config` reads back to an equal tree. Passwords in URLs and secret fields are
    masked.

    `section` is the header of the service's own keys. Settings without a value (None) appear as
    comments, because TOML has no null.
    """
    shared = [name for name in SHARED_SECTIONS if name in type(config).model_fields]
    lines: list[str] = []
    for name in shared:
        lines += _table(name, getattr(config, name))
    lines += _table(section, config, skip=shared)
    return "\n".join(lines).lstrip("\n") + "\n"


def _table(path: str, node: Config, skip: list[str] | None = None) -> Iterator[str]:
    """Lines of one table: plain values first, then the nested tables, as TOML requires."""
    fields = [name for name in type(node).model_fields if name not in (skip or ())]
    values = [name for name in fields if not isinstance(getattr(node, name), Config)]
    if values:
        yield ""
        yield f"[{path}]"
    for name in values:
        description = type(node).model_fields[name].description
        if description:
            yield f"# {' '.join(description.split())}"
        value = getattr(node, name)
        yield f"# {name} has no value" if value is None else f"{name} = {toml_value(value)}"
    for name in fields:
        if name not in values:
            yield from _table(f"{path}.{name}", getattr(node, name))


def toml_value(value: Any, *, masked: bool = True) -> str:
    """A value as TOML. Raises ConfigError for a type without a TOML form."""
    inner = partial(toml_value, masked=masked)
    match value:
        case Config():
            return inner({name: getattr(value, name) for name in type(value).model_fields})
        case SecretStr():
            return f'"{MASK}"'
        case Enum():
            return inner(value.value)
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str() | Path():
            text = str(value)
            return _text(_URL_PASSWORD.sub(rf"\1:{MASK}@", text) if masked else text)
        case dict():
            held = {toml_key(k): inner(v) for k, v in value.items() if v is not None}
            return "{" + ", ".join(f"{key} = {one}" for key, one in held.items()) + "}"
        case list() | tuple() | set() | frozenset():
            return "[" + ", ".join(inner(item) for item in value) + "]"
    raise ConfigError("a setting of this type has no TOML form", seen=type(value).__name__)


def toml_key(key: object) -> str:
    """A key, quoted if TOML requires it."""
    text = str(key.value if isinstance(key, Enum) else key)
    return text if _BARE_KEY.fullmatch(text) else _text(text)


def _text(text: str) -> str:
    """A basic TOML string.

    JSON escapes are valid TOML escapes, but TOML also requires an escape for DEL.
    """
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
