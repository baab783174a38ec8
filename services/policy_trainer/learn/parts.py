"""Says what the time of a step goes to, in seconds and as spans."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist

from paceline.telemetry import names, span


class StepParts:
    """Seconds of this rank by part, a span of each on rank 0, until they are taken."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The block belongs to that part. On CUDA what it has begun may end in a later one, up to
        the optimiser, which waits for the gradient's norm.
        """
        started = time.perf_counter()
        with span(names.policy_part(name)) if dist.get_rank() == 0 else nullcontext():
            yield
        self._seconds[name] += time.perf_counter() - started

    def taken(self) -> dict[str, float]:
        """Seconds by figure, from 0 on again."""
        found = {f"seconds/{name}": value for name, value in self._seconds.items()}
        self._seconds.clear()
        return found
