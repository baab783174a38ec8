"""Tracks the memory that an engine has released; no request runs until its return."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from paceline.errors import FailedPrecondition
from paceline.services.rollout_gateway.engines.nouns import MemoryTag


class MemoryPart(NamedTuple):
    """Functions that release and restore one part."""

    release: Callable[[], int]
    """Frees the part; returns the bytes freed."""
    resume: Callable[[], None]


class EngineMemory:
    """The parts of one engine; tags of absent parts count 0 bytes."""

    def __init__(self, parts: Mapping[MemoryTag, MemoryPart]) -> None:
        self._parts = parts
        self.released: set[MemoryTag] = set()

    def release(self, tags: Sequence[MemoryTag], running: int) -> int:
        """See Engine.release_memory; `running` counts requests that run or wait."""
        check_idle(running)
        wanted = [tag for tag in tags or MemoryTag if tag not in self.released]
        self.released.update(wanted)
        return sum(self._parts[tag].release() for tag in wanted if tag in self._parts)

    def resume(self, tags: Sequence[MemoryTag]) -> None:
        """See Engine.resume_memory."""
        check_released(tags, self.released)
        for tag in tags or sorted(self.released):
            if tag in self._parts:
                self._parts[tag].resume()
            self.released.discard(tag)


def check_idle(running: int) -> None:
    """Raises FailedPrecondition while requests run or wait."""
    if running:
        raise FailedPrecondition("requests run; abort them or wait", seen=running, allowed=0)


def check_released(tags: Collection[str], released: Collection[str]) -> None:
    """Raises FailedPrecondition for memory that was not released."""
    if held := sorted(set(tags) - set(released)):
        raise FailedPrecondition(
            "this memory was not released", seen=held, allowed=sorted(released)
        )


def check_held(released: Collection[str]) -> None:
    """Raises FailedPrecondition for a request while memory is released."""
    if released:
        raise FailedPrecondition(
            "the engine has given memory back; resume it first",
            seen=sorted(released),
            allowed="nothing released",
        )
