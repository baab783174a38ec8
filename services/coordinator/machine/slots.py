"""Slots, their holders and the states of engine workers, with values kept for thousands of
slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import compress, count, zip_longest
from operator import attrgetter, is_not
from typing import Any, Generic, TypeVar

T = TypeVar("T")
BLOCK = 64
"""Number of values that are copied together when one value changes."""
_NOTHING = object()


class Row(Generic[T]):
    """An immutable list, counted by kind. A changed list shares all other blocks with the
    old one.
    """

    __slots__ = ("_blocks", "_counts", "_kind_of", "_length")

    def __init__(self, values: Iterable[T], kind_of: Callable[[T], Hashable]) -> None:
        """`kind_of`: the kind of a value."""
        whole = tuple(values)
        self._blocks = tuple(whole[i : i + BLOCK] for i in range(0, len(whole), BLOCK))
        self._kind_of = kind_of
        self._counts: Mapping[Hashable, int] = Counter(map(kind_of, whole))
        self._length = len(whole)

    def replaced(self, changes: Mapping[int, T]) -> Row[T]:
        """The row with other values at some places. Raises IndexError for a place out of range."""
        blocks, counts = list(self._blocks), dict(self._counts)
        touched: dict[int, list[T]] = {}
        for index, value in changes.items():
            number, place = divmod(index, BLOCK)
            if number not in touched:
                touched[number] = list(blocks[number])
            block = touched[number]
            kind = self._kind_of(value)
            counts[self._kind_of(block[place])] -= 1
            counts[kind] = counts.get(kind, 0) + 1
            block[place] = value
        for number, block in touched.items():
            blocks[number] = tuple(block)
        new: Row[T] = object.__new__(Row)
        new._blocks, new._counts = tuple(blocks), counts
        new._kind_of, new._length = self._kind_of, self._length
        return new

    def counted(self, kind: Hashable) -> int:
        """Number of values of a kind."""
        return self._counts.get(kind, 0)

    def where(self, kind: Hashable) -> Iterator[int]:
        """Places of the values of a kind, in order."""
        left = self.counted(kind)
        for number, block in enumerate(self._blocks):
            if not left:
                return
            for place, value in enumerate(block):
                if self._kind_of(value) == kind:
                    left -= 1
                    yield number * BLOCK + place

    def changed_since(self, old: Row[T]) -> Iterator[int]:
        """Places with values that differ from an older row, or that the older row lacks."""
        if self is old:
            return
        for number, block, was in _others(self._blocks, old._blocks, ()):
            for place, value, before in _others(block, was, _NOTHING):
                if value != before:
                    yield number * BLOCK + place

    def __getitem__(self, index: int) -> T:
        return self._blocks[index // BLOCK][index % BLOCK]

    def __iter__(self) -> Iterator[T]:
        return (value for block in self._blocks for value in block)

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Row):
            return self._blocks == other._blocks
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._blocks)

    def __repr__(self) -> str:
        return f"Row{tuple(self)}"


def _others(
    values: Sequence[Any], old: Sequence[Any], nothing: Any
) -> Iterator[tuple[int, Any, Any]]:
    """Places with different objects, and both objects. The comparison skips equal blocks without a
    Python loop.
    """
    if len(values) == len(old):
        for place in compress(count(), map(is_not, values, old)):
            yield place, values[place], old[place]
        return
    for place, (value, before) in enumerate(zip_longest(values, old, fillvalue=nothing)):
        yield place, value, before


class Holder(StrEnum):
    """Holder of a slot."""

    NONE = "none"
    ENGINE = "engine"
    POLICY = "policy"
    DRAFTER = "drafter"


class WorkerState(StrEnum):
    """State of an engine worker with respect to its slots."""

    IDLE = "idle"
    GENERATING = "generating"
    SUSPENDED = "suspended"  # requests are held while the policy trains on the worker's slots
    RELEASED = "released"
    TRAINING = "training"
    COMPLETED = "completed"


class Cause(StrEnum):
    """Cause of a worker's transition."""

    STEP_BEGAN = "StepBegan"
    SHARE_DONE = "ShareDone"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    LEASE_GRANTED = "LeaseGranted"
    DRAFTER_DONE = "DrafterDone"
    PREEMPTED = "Preempted"
    POLICY_STEPPED = "PolicyStepped"
    COMMITTED = "Committed"


WORKER_TRANSITIONS: dict[tuple[WorkerState, Cause], WorkerState] = {
    (WorkerState.IDLE, Cause.STEP_BEGAN): WorkerState.GENERATING,
    (WorkerState.GENERATING, Cause.SHARE_DONE): WorkerState.RELEASED,
    (WorkerState.GENERATING, Cause.SUSPENDED): WorkerState.SUSPENDED,
    (WorkerState.SUSPENDED, Cause.RESUMED): WorkerState.GENERATING,
    (WorkerState.SUSPENDED, Cause.SHARE_DONE): WorkerState.RELEASED,
    (WorkerState.RELEASED, Cause.LEASE_GRANTED): WorkerState.TRAINING,
    (WorkerState.RELEASED, Cause.STEP_BEGAN): WorkerState.GENERATING,
    (WorkerState.TRAINING, Cause.DRAFTER_DONE): WorkerState.COMPLETED,
    (WorkerState.TRAINING, Cause.PREEMPTED): WorkerState.COMPLETED,
    (WorkerState.COMPLETED, Cause.STEP_BEGAN): WorkerState.GENERATING,
    (WorkerState.COMPLETED, Cause.POLICY_STEPPED): WorkerState.RELEASED,
    (WorkerState.COMPLETED, Cause.COMMITTED): WorkerState.RELEASED,
}


@dataclass(frozen=True, slots=True)
class Slot:
    """A GPU, or a core on a CPU: one holder at a time, fenced by the epoch of its newest lease."""

    holder: Holder = Holder.NONE
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class DrafterLease:
    """Slots that the drafter trainer holds at present."""

    epoch: int
    slots: tuple[int, ...]
    preempting: bool = False
    attached: int = 0  # number of slots, from the first, confirmed by its trainer


def slot_row(slots: Iterable[Slot]) -> Row[Slot]:
    """Slots, counted by holder."""
    return Row(slots, attrgetter("holder"))


def worker_row(workers: Iterable[WorkerState]) -> Row[WorkerState]:
    """Workers, counted by state."""
    return Row(workers, lambda worker: worker)
