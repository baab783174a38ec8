"""Converts frozen dataclasses to protobuf messages with the same field names, and back.

None becomes an absent field. An enum value maps by name ("stop": FINISH_REASON_STOP). Small
integers may travel as bytes. A dataclass field that its message lacks raises KeyError.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar, get_args, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from paceline.tasks import Task
from paceline.trajectory import SpeculationStats, VersionSet
from paceline.v1 import trajectory_pb2 as pb
from paceline.v1.engine_pb2 import ArmStats
from paceline.v1.rollout_pb2 import TaskSpec

M = TypeVar("M", bound=Message)
N = TypeVar("N")
_Put = Callable[[Any], Any]
_Take = Callable[[Any], Any]
# Caches: a rollout converts a dozen dataclasses per sample.
_HINTS: dict[type[Any], dict[str, Any]] = {}
_PUTTERS: dict[tuple[type[Any], type[Message]], list[tuple[str, _Put]]] = {}
_TAKERS: dict[tuple[type[Any], type[Message]], list[tuple[str, _Take]]] = {}


def to_message(noun: object, kind: type[M]) -> M:
    """Converts a dataclass to a message of this kind."""
    return kind(**{name: put(getattr(noun, name)) for name, put in _putters(type(noun), kind)})


def from_message(cls: type[N], message: Message) -> N:
    """Converts a message to a dataclass."""
    return cls(**{name: take(message) for name, take in _takers(cls, type(message))})


def shared_fields(noun: object, kind: type[Message]) -> dict[str, Any]:
    """The fields that a dataclass shares with a message: scalars, lists and maps of scalars."""
    return {
        name: getattr(noun, name)
        for name in _hints(type(noun))
        if name in kind.DESCRIPTOR.fields_by_name
    }


def versions_to_proto(versions: VersionSet) -> pb.VersionSet:
    """Converts a version set to its message."""
    return to_message(versions, pb.VersionSet)


def versions_from_proto(message: pb.VersionSet) -> VersionSet:
    """Converts a message to its version set."""
    return from_message(VersionSet, message)


def stats_to_proto(stats: SpeculationStats) -> pb.SpeculationStats:
    """Converts speculation counters to their message."""
    return to_message(stats, pb.SpeculationStats)


def stats_from_proto(message: pb.SpeculationStats) -> SpeculationStats:
    """Converts a message to its speculation counters."""
    return from_message(SpeculationStats, message)


def merge_arms(stats: Iterable[ArmStats]) -> list[ArmStats]:
    """Bandit statistics of several workers: counts summed, means weighted by pulls."""
    merged: dict[tuple[str, int], ArmStats] = {}
    for one in stats:
        empty = ArmStats(arm=one.arm, batch_group=one.batch_group)
        into = merged.setdefault((one.arm, one.batch_group), empty)
        pulls = into.pulls + one.pulls
        for name in ("mean_tokens_per_s", "mean_accept_length"):
            total = getattr(into, name) * into.pulls + getattr(one, name) * one.pulls
            setattr(into, name, total / pulls if pulls else 0.0)
        into.pulls = pulls
        into.explorations += one.explorations
        into.drafter_deaths += one.drafter_deaths
    return [merged[key] for key in sorted(merged)]


def _hints(cls: type[Any]) -> Mapping[str, Any]:
    """Type hints of a dataclass by field."""
    if cls not in _HINTS:
        hints = get_type_hints(cls)
        _HINTS[cls] = {field.name: hints[field.name] for field in fields(cls)}
    return _HINTS[cls]


def _putters(cls: type[Any], kind: type[Message]) -> Sequence[tuple[str, _Put]]:
    """(field name, converter to the message's value) for each field of a dataclass."""
    if (cls, kind) not in _PUTTERS:
        described = kind.DESCRIPTOR.fields_by_name
        _PUTTERS[cls, kind] = [(name, _putter(described[name])) for name in _hints(cls)]
    return _PUTTERS[cls, kind]


def _putter(field: Any) -> _Put:
    def unless_none(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda value: None if value is None else make(value)

    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            return unless_none(dict)
        kind: type[Message] = GetMessageClass(field.message_type)
        if field.is_repeated:
            return unless_none(lambda value: [to_message(one, kind) for one in value])
        return unless_none(lambda value: to_message(value, kind))
    if field.enum_type is not None:
        prefix = _prefix(field)
        return unless_none(lambda value: prefix + value.upper())
    return unless_none(bytes) if field.type == FieldDescriptor.TYPE_BYTES else _as_it_is


def _takers(cls: type[Any], kind: type[Message]) -> Sequence[tuple[str, _Take]]:
    """(field name, reader from the message) for each field of a dataclass."""
    if (cls, kind) not in _TAKERS:
        described, hints = kind.DESCRIPTOR.fields_by_name, _hints(cls)
        _TAKERS[cls, kind] = [(name, _taker(hints[name], described[name])) for name in hints]
    return _TAKERS[cls, kind]


def _taker(hint: Any, field: Any) -> _Take:
    read = attrgetter(field.name)
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            return lambda message: dict(read(message))
        if field.is_repeated:
            one = partial(from_message, get_args(hint)[0])
            return lambda message: tuple(map(one, read(message)))
        return lambda message: from_message(hint, read(message))
    if field.enum_type is not None:
        prefix = _prefix(field)
        named = {
            one.number: one.name.removeprefix(prefix).lower() for one in field.enum_type.values
        }
        return lambda message: hint(named[read(message)])
    several = field.is_repeated or field.type == FieldDescriptor.TYPE_BYTES
    whole = (lambda message: tuple(read(message))) if several else read
    if field.has_presence:
        return lambda message: whole(message) if message.HasField(field.name) else None
    return whole


def _as_it_is(value: Any) -> Any:
    return value


def _prefix(field: Any) -> str:
    """The common prefix of an enum's value names, such as FINISH_REASON_."""
    return str(field.enum_type.values[0].name.removesuffix("UNSPECIFIED"))


def task_specs(tasks: Iterable[tuple[int, Task]], group: str) -> list[TaskSpec]:
    """Task specs from (task index, task) pairs. The group id of a task is `group` and its index."""
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
