"""Measures the seconds of a piece of work, and the device's speed of matrix products."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache

import torch


class Stopwatch:
    """Seconds by lap, since the last start and in total."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.laps: dict[str, float] = {}
        self.totals: defaultdict[str, float] = defaultdict(float)
        self._last = 0.0

    def start(self) -> None:
        """Begin the first lap."""
        self.laps = {}
        self._last = self._clock()

    def lap(self, name: str) -> None:
        """End a lap and begin the next one."""
        now = self._clock()
        self.laps[name] = now - self._last
        self.totals[name] += now - self._last
        self._last = now

    @property
    def seconds(self) -> float:
        """Sum of the laps since the last start."""
        return sum(self.laps.values())


def compute_clock() -> Callable[[], float]:
    """Clock for torch computation with the current number of threads."""
    # With one thread, its CPU time is the cost of a round even while other processes use the core.
    # With more threads, only the wall clock includes the gain of running in parallel.
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


FIRST_SIZE = 128
LARGEST_SIZE = {"cpu": 1024, "cuda": 4096}
LONG_ENOUGH_S = 0.002
PRODUCTS = 3


@lru_cache
def square_product_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """10^12 operations per second of C = A B with square matrices, at 2 n^3 operations each.

    Measured once per process. It is the measured peak with torch's threads, not the vendor's
    number, and on a shared machine only the free share. n doubles until a product takes 2 ms or n
    is the largest for its kind of device. The result is the median of 3 products of that size. It
    takes some 50 ms on a CPU, since a size is at most 8 times as much work as the size before.
    """
    largest = LARGEST_SIZE.get(device.type, FIRST_SIZE)
    size = FIRST_SIZE
    while True:
        seconds = _median_s(size, device, dtype)
        if seconds >= LONG_ENOUGH_S or size >= largest:
            return 2.0 * size**3 / seconds / 1e12
        size *= 2


def _median_s(size: int, device: torch.device, dtype: torch.dtype) -> float:
    left, right = torch.ones(2, size, size, device=device, dtype=dtype)
    timed = []
    for _ in range(PRODUCTS):
        _wait(device)
        began = time.perf_counter()
        torch.mm(left, right)
        _wait(device)
        timed.append(time.perf_counter() - began)
    return statistics.median(timed)


def _wait(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
