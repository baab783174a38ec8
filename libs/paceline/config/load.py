"""Loads TOML files and overrides into a validated tree, and rejects each unknown or invalid key by
name.
"""

from __future__ import annotations

import difflib
import enum
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError

from paceline.config.base import Config, child_configs, known_keys, walk_fields
from paceline.config.shared import SERVICE_SECTIONS, SHARED_SECTIONS
from paceline.config.tables import Tree, merge, nested, read_tables, value_of
from paceline.errors import ConfigError

C = TypeVar("C", bound=Config)

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


@dataclass(frozen=True)
class _Source:
    """Settings of a file or an override: `name` for messages, `values` by the tree's own keys."""

    name: str
    values: Tree


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
    for source in sources:
        _refuse_unknown(cls, source, section)
        merge(merged, source.values)
        origins.update(dict.fromkeys(_dotted(source.values), source.name))

    try:
        return cls.model_validate(merged)
    except ValidationError as error:
        raise _readable(error, origins) from error


def _file_source(path: Path, cls: type[Config], section: str) -> _Source:
    document = read_tables(path)
    sections = dict.fromkeys((*SHARED_SECTIONS, *SERVICE_SECTIONS, section))
    values: Tree = {}
    for name, content in document.items():
        if name not in sections:
            raise ConfigError(
                f"{path}: unknown section{_nearest(name, [*sections])}",
                seen=name,
                allowed=list(sections),
            )
        if not isinstance(content, dict):
            raise ConfigError(
                f"{path}: {name} is a section, not a value", seen=content, allowed=f"[{name}]"
            )
        if name in SHARED_SECTIONS and name in cls.model_fields:
            merge(values, {name: content})

    merge(values, document.get(section, {}))
    return _Source(str(path), values)


def _override_source(text: str, cls: type[Config], section: str) -> _Source | None:
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not _KEY.fullmatch(key):
        raise ConfigError(
            "an override is key=value with a dotted key", seen=text, allowed="e.g. run.seed=1"
        )
    head, _, rest = key.partition(".")
    if head not in cls.model_fields and rest and head in (section, *SERVICE_SECTIONS):
        if head != section:
            return None
        key = rest
    as_written = _wants_text(_annotation(cls, key)) and raw[:1] not in ("'", '"')
    return _Source(f"override {text}", nested(key, raw if as_written else value_of(raw)))


def _annotation(cls: type[Config], key: str) -> Any:
    return next((annotation for known, annotation in walk_fields(cls) if known == key), None)


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
        default = (
            None
            if field.is_required()
            else field.get_default(call_default_factory=True, validated_data={})
        )
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


def _refuse_unknown(cls: type[Config], source: _Source, section: str) -> None:
    for key in _unknown((cls,), source.values):
        keys = known_keys(cls)
        near = _nearest(key, keys) or _nearest(key.rpartition(".")[2], keys)
        raise ConfigError(f"{source.name}: {section} has no setting {key}{near}", seen=key)


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
            child for cls in holders for child in child_configs(cls.model_fields[key].annotation)
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
