"""Defines the base of every settings class and walks over its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A frozen node of a settings tree; rejects unknown keys.

    The docstring below a field is its description.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )


def child_configs(annotation: Any) -> tuple[type[Config], ...]:
    """The settings classes of a field: its own type, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return (annotation,)
    if getattr(annotation, "__origin__", None) in (tuple, list, dict, set, frozenset):
        return ()
    return tuple(child for member in get_args(annotation) for child in child_configs(member))


def walk_fields(cls: type[Config], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, annotation) for every leaf, in declaration order."""
    for name, field in cls.model_fields.items():
        children = child_configs(field.annotation)
        if not children:
            yield prefix + name, field.annotation
        for child in children:
            yield from walk_fields(child, f"{prefix}{name}.")


def known_keys(cls: type[Config]) -> list[str]:
    """All dotted keys of the tree, sorted and unique."""
    return sorted({key for key, _ in walk_fields(cls)})
