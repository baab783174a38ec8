"""Converts nouns, which are frozen dataclasses, to messages with the same field names, and back.

None is an absent field, an enum goes by its name ("stop": FINISH_REASON_STOP), small integers may
go as bytes. A noun with a field that its message lacks raises KeyError.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar, get_args, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from paceline.tasks import Task
from paceline.trajectory import SpeculationStats, Trajectory, VersionSet
from paceline.v1 import trajectory_pb2 as pb
from paceline.v1.rollout_pb2 import TaskSpec

M = TypeVar("M", bound=Message)
N = TypeVar("N")
_HINTS: dict[type[Any], dict[str, Any]] = {}  # by dataclass: field -> annotation


def to_message(noun: object, kind: type[M]) -> M:
    """The noun as a message of this kind."""
    described = kind.DESCRIPTOR.fields_by_name
    return kind(**{name: _put(getattr(noun, name), described[name]) for name in _hints(type(noun))})


def from_message(cls: type[N], message: Message) -> N:
    """The noun of a message."""
    described = message.DESCRIPTOR.fields_by_name
    hints = _hints(cls)
    return cls(**{name: _take(hint, message, described[name]) for name, hint in hints.items()})


def shared_fields(noun: object, kind: type[Message]) -> dict[str, Any]:
    """The fields of a noun that a message has too: scalars, and lists and maps of scalars."""
    return {
        name: getattr(noun, name)
        for name in _hints(type(noun))
        if name in kind.DESCRIPTOR.fields_by_name
    }


def versions_to_proto(versions: VersionSet) -> pb.VersionSet:
    """Message of a set."""
    return to_message(versions, pb.VersionSet)


def versions_from_proto(message: pb.VersionSet) -> VersionSet:
    """Set of a message."""
    return from_message(VersionSet, message)


def stats_to_proto(stats: SpeculationStats) -> pb.SpeculationStats:
    """Message of counters."""
    return to_message(stats, pb.SpeculationStats)


def stats_from_proto(message: pb.SpeculationStats) -> SpeculationStats:
    """Counters of a message."""
    return from_message(SpeculationStats, message)


def trajectory_to_proto(trajectory: Trajectory) -> pb.Trajectory:
    """Message of a branch."""
    return to_message(trajectory, pb.Trajectory)


def _hints(cls: type[Any]) -> dict[str, Any]:
    if cls not in _HINTS:
        hints = get_type_hints(cls)
        _HINTS[cls] = {field.name: hints[field.name] for field in fields(cls)}
    return _HINTS[cls]


def _put(value: Any, field: Any) -> Any:
    if value is None:
        return None
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            return dict(value)
        kind: type[Message] = GetMessageClass(field.message_type)
        if field.is_repeated:
            return [to_message(one, kind) for one in value]
        return to_message(value, kind)
    if field.enum_type is not None:
        return _prefix(field) + value.upper()
    return bytes(value) if field.type == FieldDescriptor.TYPE_BYTES else value


def _take(hint: Any, message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            return dict(value)
        if field.is_repeated:
            return tuple(from_message(get_args(hint)[0], one) for one in value)
        return from_message(hint, value)
    if field.enum_type is not None:
        name = field.enum_type.values_by_number[value].name.removeprefix(_prefix(field)).lower()
        return hint(name)
    if field.has_presence and not message.HasField(field.name):
        return None
    return tuple(value) if isinstance(value, bytes) or field.is_repeated else value


def _prefix(field: Any) -> str:
    """What the names of an enum's values begin with, such as FINISH_REASON_."""
    return str(field.enum_type.values[0].name.removesuffix("UNSPECIFIED"))


def task_specs(tasks: Iterable[tuple[int, Task]], group: str) -> list[TaskSpec]:
    """Tasks by their places, each with a group of its samples, named after `group`."""
    return [
        TaskSpec(
            task_id=task.task_id,
            prompt=task.prompt,
            answer=task.answer,
            group_id=f"{group}.t{index}",
            task_index=index,
            metadata=task.metadata,
        )
        for index, task in tasks
    ]
