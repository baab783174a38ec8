"""Reads, merges and writes TOML tables as plain dicts."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.config.render import toml_key, toml_value
from paceline.errors import ConfigError
from paceline.whole_files import write_whole

Tree = dict[str, Any]


def read_tables(path: Path) -> Tree:
    """Reads the tables of a file. Raises ConfigError if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file: {error.strerror}", seen=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def write_tables(path: Path, tree: Mapping[str, Any]) -> None:
    """Writes tables to a file that only its owner can read: a Redis URL may hold a password."""
    write_whole(path, "\n".join(_lines(tree)).lstrip("\n") + "\n")


def merge(into: Tree, new: Mapping[str, Any]) -> None:
    """Merges `new` into `into`: tables merge, all other values are replaced."""
    for key, value in new.items():
        if isinstance(value, Mapping):
            below = into.get(key)
            into[key] = dict(below) if isinstance(below, dict) else {}
            merge(into[key], value)
        else:
            into[key] = value


def nested(key: str, value: Any) -> Tree:
    """The nested tables of a dotted key, with the value at the innermost level."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def value_of(raw: str) -> Any:
    """The value of an override: parsed as TOML, else the text itself."""
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw


def _lines(tree: Mapping[str, Any], path: str = "") -> Iterator[str]:
    values = {key: value for key, value in tree.items() if not isinstance(value, Mapping)}
    if path and (values or not tree):
        yield f"\n[{path}]"
    for key, value in values.items():
        yield f"{toml_key(key)} = {toml_value(value, masked=False)}"
    for key, value in tree.items():
        if isinstance(value, Mapping):
            below = toml_key(key)
            yield from _lines(value, f"{path}.{below}" if path else below)
