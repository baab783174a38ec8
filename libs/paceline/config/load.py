"""Reads TOML files and overrides into a validated tree, and writes trees with masked secrets."""

import difflib
import enum
import json
import re
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

from pydantic import SecretStr, ValidationError

from paceline import config as settings
from paceline.config import Config
from paceline.errors import ConfigError
from paceline.whole_files import write_whole

MASK = "****"
_URL_PASSWORD = re.compile(r"(?<=://)([^/@\s]*):([^/@\s]*)@")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def print_config(config: Config, section: str) -> str:
    """TOML that `load_config` reads back to an equal tree. Passwords in URLs and secret fields are
    masked.

    `section` is the header of the service's own keys. Settings without a value (None) appear as
    comments, because TOML has no null.
    """
    sections = [name for name in settings.SHARED_SECTIONS if name in type(config).model_fields]
    lines: list[str] = []
    for name in sections:
        lines += _lines(getattr(config, name), name)
    lines += _lines(config, section, skip=sections)
    return "\n".join(lines).lstrip("\n") + "\n"


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


def _lines(
    tree: Mapping[str, Any] | Config, path: str = "", skip: Sequence[str] = ()
) -> Iterator[str]:
    """Lines of a table: plain values first, then the nested tables, as TOML requires. Settings are
    described, and their secrets masked.
    """
    described = type(tree).model_fields if isinstance(tree, Config) else {}
    held = {name: getattr(tree, name) for name in described if name not in skip}
    below: type[Any] = Config
    if not isinstance(tree, Config):
        held, below = dict(tree), Mapping
    tables = {name: value for name, value in held.items() if isinstance(value, below)}
    if path and (len(tables) < len(held) or not held):
        yield f"\n[{path}]"
    for name, value in held.items():
        if name in tables:
            continue
        if name in described and (description := described[name].description):
            yield f"# {' '.join(description.split())}"
        if value is None:
            yield f"# {name} has no value"
        else:
            yield f"{toml_key(name)} = {toml_value(value, masked=name in described)}"
    for name, value in tables.items():
        yield from _lines(value, f"{path}.{toml_key(name)}" if path else toml_key(name))


C = TypeVar("C", bound=Config)

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


_Source: TypeAlias = tuple[str, Tree]
"""A file or an override: its name for messages, and its values by the tree's own keys."""


def load_config(
    cls: type[C], section: str, files: Sequence[Path] = (), overrides: Sequence[str] = ()
) -> C:
    """Loads the settings tree of one service.

    Later files override earlier files, and overrides override files. Tables merge; all other values
    are replaced. In a file, only the shared sections and `[section]` apply; sections of other
    services are ignored. Keys in `[section]` belong to the root of the tree. So `[section]` may
    hold a shared section that applies to this service only. An override names a key of the tree
    (`engine.dtype=float32`) or begins with a service's section. Its value is a TOML value, else
    text.

    Raises ConfigError for a file that cannot be read, an unknown section or key, and an invalid
    value.
    """
    sources = [_file_source(path, cls, section) for path in files]
    sources += [
        source for text in overrides if (source := _override_source(text, cls, section)) is not None
    ]
    merged = _explicit_defaults(cls)
    origins: dict[str, str] = {}
    for name, values in sources:
        for key in _unknown((cls,), values):
            keys = settings.known_keys(cls)
            near = _nearest(key, keys) or _nearest(key.rpartition(".")[2], keys)
            raise ConfigError(f"{name}: {section} has no setting {key}{near}", seen=key)
        merge(merged, values)
        origins.update(dict.fromkeys(_dotted(values), name))

    try:
        return cls.model_validate(merged)
    except ValidationError as error:
        raise _readable(error, origins) from error


def _file_source(path: Path, cls: type[Config], section: str) -> _Source:
    document = read_tables(path)
    sections = dict.fromkeys((*settings.SHARED_SECTIONS, *settings.SERVICE_SECTIONS, section))
    values: Tree = {}
    for name, content in document.items():
        if name not in sections:
            message = f"{path}: unknown section{_nearest(name, [*sections])}"
            raise ConfigError(message, seen=name, allowed=list(sections))
        if not isinstance(content, dict):
            message = f"{path}: {name} is a section, not a value"
            raise ConfigError(message, seen=content, allowed=f"[{name}]")
        if name in settings.SHARED_SECTIONS and name in cls.model_fields:
            merge(values, {name: content})

    merge(values, document.get(section, {}))
    return str(path), values


def _override_source(text: str, cls: type[Config], section: str) -> _Source | None:
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not _KEY.fullmatch(key):
        message = "an override is key=value with a dotted key"
        raise ConfigError(message, seen=text, allowed="e.g. run.seed=1")
    head, _, rest = key.partition(".")
    if head not in cls.model_fields and rest and head in (section, *settings.SERVICE_SECTIONS):
        if head != section:
            return None
        key = rest
    as_written = _wants_text(dict(settings.walk_fields(cls)).get(key)) and raw[:1] not in ("'", '"')
    return f"override {text}", nested(key, raw if as_written else value_of(raw))


def _wants_text(annotation: Any) -> bool:
    """Whether the annotation allows text only, so that `run.id=007` or `run.id=2026-01-01` stays
    text.
    """
    origin = get_origin(annotation)
    if origin is Literal:
        return all(isinstance(choice, str) for choice in get_args(annotation))
    if origin in (Union, types.UnionType):
        return all(member is type(None) or _wants_text(member) for member in get_args(annotation))
    return isinstance(annotation, type) and issubclass(annotation, str | Path | enum.StrEnum)


def _explicit_defaults(cls: type[Config]) -> Tree:
    """The values that a field's default node sets explicitly (`optim: Optim = Optim(lr=1e-4)`).

    Without them, an override of one key resets the other keys to the defaults of the class. Default
    tables merge in the same way.
    """
    tree: Tree = {}
    for name, field in cls.model_fields.items():
        if field.is_required():
            continue
        default = field.get_default(call_default_factory=True, validated_data={})
        if isinstance(default, Config):
            tree[name] = default.model_dump(exclude_unset=True)
        elif isinstance(default, dict):
            tree[name] = dict(default)
    return tree


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")


def _unknown(
    classes: Sequence[type[Config]], values: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    """Dotted keys that match no field. Below a leaf, such as a dict field, pydantic validates."""
    for key, value in values.items():
        holders = [cls for cls in classes if key in cls.model_fields]
        if not holders:
            yield prefix + key
            continue
        children = [
            child
            for cls in holders
            for child in settings.child_configs(cls.model_fields[key].annotation)
        ]
        if children and isinstance(value, dict):
            yield from _unknown(children, value, f"{prefix}{key}.")


def _nearest(key: str, known: Sequence[str]) -> str:
    """Returns "; nearest: ..." with the closest key, or an empty string.

    An exact match of a last part outranks similarity of the whole key.
    """
    ends = {k.rpartition(".")[2]: k for k in reversed(known)}
    if key in ends:
        return f"; nearest: {ends[key]}"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not close:
        close = [ends[end] for end in difflib.get_close_matches(key, list(ends), n=1, cutoff=0.5)]
    return f"; nearest: {close[0]}" if close else ""


def _readable(error: ValidationError, origins: Mapping[str, str]) -> ConfigError:
    lines = []
    first = error.errors(include_url=False)[0]
    for item in error.errors(include_url=False):
        parts = [str(part) for part in item["loc"]]
        key = ".".join(parts)
        origin = next(
            (origins[k] for n in range(len(parts), 0, -1) if (k := ".".join(parts[:n])) in origins),
            "",
        )
        seen = "" if item["type"] == "missing" else f" (seen: {item['input']!r})"
        said = "not a setting" if item["type"] == "extra_forbidden" else item["msg"]
        lines.append(f"{key or 'the settings'}{f' from {origin}' if origin else ''}: {said}{seen}")
    context = first.get("ctx", {})
    return ConfigError("; ".join(lines), allowed=context.get("expected") or context.get("pattern"))
