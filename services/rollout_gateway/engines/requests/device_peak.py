"""Measures the device's speed of matrix products, by which tokens per second are divided."""

from __future__ import annotations

import statistics
import time
from functools import lru_cache

import torch

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
