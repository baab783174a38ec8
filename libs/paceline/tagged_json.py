"""Writes frozen dataclasses as JSON objects and reads them back, checked against their annotations.

A `TaggedJson` handles several classes, each under its name: `{"type": "Preempt", "epoch": 3}`.
Supported scalar fields: bool, int, float, str, None, literals and enums (by value). Supported
composite fields: dataclasses (as plain objects), lists, tuples, frozen sets, mappings with string
keys, and unions. An int of more than 2048 bits is `{"hex": "0x..."}`. Decimal digits take quadratic
time, and Python rejects more than 4,300 digits.
"""

import json
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.errors import DataLoss

TAG = "type"
HEX, _LARGE = "hex", 1 << 2048
_LARGE_DIGITS = re.compile("-?0x[1-9a-f][0-9a-f]{512,}")  # at least _LARGE in magnitude

T = TypeVar("T")
_Reader = Callable[[Any, str], Any]  # (JSON value, its path in the message) -> the field's value
_READERS: dict[Any, dict[str, _Reader]] = {}  # by dataclass and names, filled at first use


class TaggedJson(Generic[T]):
    """Encodes and decodes a set of classes; each object carries the name of its class."""

    def __init__(self, *classes: type[T]) -> None:
        self._classes = {cls.__name__: cls for cls in classes}
        for cls in classes:
            if TAG in _readers(cls):
                raise TypeError(f"{cls.__name__}.{TAG} would hide the tag")

    def encode(self, value: T) -> bytes:
        """The value as one line of JSON."""
        name = type(value).__name__
        if self._classes.get(name) is not type(value):
            raise TypeError(f"{name} is not one of {', '.join(self._classes)}")
        return json.dumps({TAG: name, **to_object(value)}, separators=(",", ":")).encode()

    def decode(self, data: bytes | str) -> T:
        """Reverses `encode`. Raises DataLoss if `data` is no such value."""
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DataLoss(f"a message is not JSON: {error}", seen=data[:200]) from error
        if not isinstance(found, Mapping) or TAG not in found:
            raise DataLoss(f"a message has no {TAG}", seen=str(found)[:200])
        cls = self._classes.get(found[TAG]) if isinstance(found[TAG], str) else None
        if cls is None:
            message = f"the {TAG} of a message is not known here"
            raise DataLoss(message, seen=found[TAG], allowed=", ".join(self._classes))
        return from_object(cls, {name: value for name, value in found.items() if name != TAG})


def to_object(value: object, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """A dataclass as an object of plain JSON values, without a tag. `names`: these fields only."""
    return {name: _plain(getattr(value, name)) for name in names or _readers(type(value))}


def from_object(cls: type[T], found: Any, where: str = "") -> T:
    """Reverses `to_object`.

    Raises DataLoss with the name of a field that is unknown, missing or of another type.
    """
    return cls(**fields_of(cls, found, where=where))


def fields_of(
    cls: type[Any], found: Any, names: tuple[str, ...] = (), where: str = ""
) -> dict[str, Any]:
    """As `from_object`, for the fields of these names alone: their values by name."""
    where = where or cls.__name__
    if not isinstance(found, Mapping):
        raise DataLoss(f"{where} is not an object", seen=str(found)[:200])
    readers = _readers(cls, names)
    for difference, odd in (
        ("has fields not known here", found.keys() - readers.keys()),
        ("lacks fields", readers.keys() - found.keys()),
    ):
        if odd:
            message = f"{where} {difference}"
            raise DataLoss(message, seen=", ".join(sorted(odd)), allowed=", ".join(readers))

    return {name: read(found[name], f"{where}.{name}") for name, read in readers.items()}


def _plain(value: Any) -> Any:
    if type(value) in _SCALARS:
        large = type(value) is int and not -_LARGE < value < _LARGE
        return {HEX: hex(value)} if large else value
    if is_dataclass(value):
        return to_object(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, frozenset):
        return sorted(_plain(one) for one in value)
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return value


def _readers(cls: type[Any], names: tuple[str, ...] = ()) -> dict[str, _Reader]:
    if (cls, names) not in _READERS:
        hints, chosen = get_type_hints(cls), names or [one.name for one in fields(cls)]
        _READERS[cls, names] = {name: _reader(hints[name]) for name in chosen}
    return _READERS[cls, names]


def _reader(hint: Any) -> _Reader:
    """The reader for a field annotation. Raises TypeError if JSON cannot carry the annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _SCALARS:
        return partial(_scalar, hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return partial(_choice, [(one.value, one) for one in hint])
    if isinstance(hint, type) and is_dataclass(hint):
        _readers(hint)
        return partial(from_object, hint)
    if origin in (list, frozenset) or (origin is tuple and arguments[1:] == (...,)):
        return partial(_items, origin, _reader(arguments[0]))
    if origin is Literal:
        return partial(_choice, [(one, one) for one in arguments])
    if origin is tuple:
        return partial(_row, [_reader(one) for one in arguments])
    if origin in (dict, Mapping) and arguments[0] is str:
        return partial(_mapping, _reader(arguments[1]))
    if origin in (Union, types.UnionType):
        others = [_reader(one) for one in arguments if one is not type(None)]
        return partial(_either, hint, others)
    raise TypeError(f"{hint} is no annotation that JSON can carry")


# An int stays an int in a float field, so that a rewrite yields the same bytes.
_SCALARS: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (float, int),
    str: (str,),
    type(None): (type(None),),
}


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if type(value) in _SCALARS[kind]:
        return value
    if int in _SCALARS[kind] and isinstance(value, Mapping) and list(value) == [HEX]:
        text = value[HEX]
        if isinstance(text, str) and _LARGE_DIGITS.fullmatch(text):
            return int(text, 16)
    raise _wrong(where, value, kind.__name__)


def _choice(allowed: list[tuple[Any, Any]], value: Any, where: str) -> Any:
    for written, meant in allowed:
        # Also compare types: by equality alone, 1 matches True.
        if written == value and type(written) is type(value):
            return meant
    raise _wrong(where, value, ", ".join(str(written) for written, _ in allowed))


def _items(kind: type[Any], read: _Reader, value: Any, where: str) -> Any:
    if not isinstance(value, list):
        raise _wrong(where, value, "a list")
    return kind(read(one, f"{where}[{index}]") for index, one in enumerate(value))


def _row(readers: list[_Reader], value: Any, where: str) -> Any:
    if not isinstance(value, list) or len(value) != len(readers):
        raise _wrong(where, value, f"a list of {len(readers)}")
    pairs = enumerate(zip(readers, value, strict=True))
    return tuple(read(one, f"{where}[{index}]") for index, (read, one) in pairs)


def _mapping(read: _Reader, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(where, value, "an object")
    return {name: read(one, f"{where}.{name}") for name, one in value.items()}


def _either(hint: Any, readers: list[_Reader], value: Any, where: str) -> Any:
    if value is None and type(None) in get_args(hint):
        return None
    for read in readers:
        try:
            return read(value, where)
        except DataLoss:
            if len(readers) == 1:
                raise
    raise _wrong(where, value, str(hint))


def _wrong(where: str, value: Any, allowed: str) -> DataLoss:
    return DataLoss(f"{where} has another type", seen=repr(value)[:200], allowed=allowed)
