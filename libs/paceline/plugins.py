"""Finds a variant by its name in a table, or a user's own object by its import path.

An import path is `package.module:Name` or `path/to/file.py:Name`. A file may import its siblings by
relative imports.
"""

import importlib.util
import pkgutil
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from paceline.errors import ConfigError, InvalidInput

OWN = "package.module:Name or path/to/file.py:Name"

Variant = TypeVar("Variant")


def find_variant(name: str, table: Mapping[str, Variant], family: str) -> Variant:
    """The variant with this name, or the object at this import path. The caller checks its type.

    `family`: the kind of object, for messages, such as "bandit". Raises ConfigError.
    """
    if name in table:
        return table[name]
    if ":" not in name:
        ours = f"{', '.join(sorted(table))}; or your own, " if table else ""
        allowed = ours + OWN
        raise ConfigError(f"no such {family}", seen=name, allowed=allowed)
    try:
        own: Variant = import_object(name)
    except Exception as error:  # a user's module may raise anything
        message = f"a {family} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(message, seen=name, allowed=OWN) from error
    return own


def import_filter(path: str, family: str) -> Callable[[Any], bool]:
    """Imports a user's predicate, which returns True for each value to keep.

    Raises ConfigError. The predicate raises InvalidInput if the user's function raises or returns a
    value that is not a bool.
    """
    own: Any = find_variant(path, {}, family)
    if not callable(own):
        raise ConfigError(f"a {family} is not callable", seen=path, allowed="a function")

    def keeps(value: Any) -> bool:
        try:
            answer = own(value)
        except Exception as error:  # a user's function may raise anything
            message = f"the {family} failed: {type(error).__name__}: {error}"
            raise InvalidInput(message, seen=repr(value)[:200]) from error
        if not isinstance(answer, bool):
            message = f"the {family} {path} must return True or False"
            raise InvalidInput(message, seen=repr(answer)[:80], allowed="True or False")
        return answer

    return keeps


def import_object(path: str) -> Any:
    """The object at an import path. Raises any error of the import."""
    place, _, attribute = path.rpartition(":")
    if place.endswith(".py"):
        return getattr(_module_of(Path(place).resolve()), attribute)
    return pkgutil.resolve_name(path)


def _module_of(path: Path) -> ModuleType:
    # Import each file once, so that its classes are equal everywhere.
    name = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    siblings = [str(path.parent)]
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=siblings)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
