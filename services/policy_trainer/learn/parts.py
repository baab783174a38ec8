"""Measures the parts of a step, in seconds and as spans."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist

from paceline.telemetry import names, span


class StepParts:
    """Seconds of this rank by part, until they are taken. Rank 0 also records a span per part."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Attributes the block to that part. On CUDA, work may finish in a later part, at the
        latest in the optimiser, which waits for the gradient's norm.
        """
        started = time.perf_counter()
        with span(names.policy_part(name)) if dist.get_rank() == 0 else nullcontext():
            yield
        self._seconds[name] += time.perf_counter() - started

    def taken(self) -> dict[str, float]:
        """Seconds by figure; restarts from 0."""
        found = {f"seconds/{name}": value for name, value in self._seconds.items()}
        self._seconds.clear()
        return found
