"""Measures the cost of a delta in memory, by the share of changed weights and by the size of the
model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from benchmarks.result import Goal, Row, at_most
from benchmarks.weights.updates import moved, stepped
from paceline.tensors import NamedTensor, from_numpy
from paceline.weights.delta import apply_delta, encode_delta

FAR = 1 << 62
SHARES = (0.0, 0.001, 0.005, 0.01, 0.03, 0.05, 0.1)
FEW = 100_000
"""Changed weights of the comparison of sizes."""
REPEATS = 7


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of all threads in one call; other load on the machine does not change them."""
    started_s = time.process_time()
    work()
    return time.process_time() - started_s


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    started_s = time.monotonic()
    work()
    return time.monotonic() - started_s


def by_share(old: list[NamedTensor]) -> list[Row]:
    """Rows with the cost of a delta by the share of weights that have moved by a unit."""
    rows: list[Row] = []
    total = sum(len(one.view) for one in old)
    for share in SHARES:
        new = [from_numpy(one.name, moved(one, share), "BF16") for one in old]
        encode = partial(encode_delta, old, new, limit=FAR)
        encoded = encode()
        assert encoded is not None
        held = [
            NamedTensor(one.name, one.dtype, one.shape, memoryview(bytearray(one.view)))
            for one in old
        ]
        apply_s = timed(partial(_apply, encoded.stream, held))
        rows.append(
            {
                "section": "by share of changed weights",
                "changed %": 100 * encoded.changed / encoded.elements,
                "bytes %": 100 * len(encoded.stream) / total,
                "encode s a GB": min(timed(encode) for _ in range(REPEATS)) / total * 1e9,
                "encode CPU s a GB": min(cpu_s(encode) for _ in range(REPEATS)) / total * 1e9,
                "apply in place s a GB": apply_s / total * 1e9,
            }
        )
    return rows


def by_size(millions: float) -> tuple[list[Row], Goal]:
    """Measures the cost of FEW changed weights above the scan, in a quarter and in all of
    `millions` million weights. The scan's own delta has a hundredth of the changes.
    """
    rows: list[Row] = []
    above = []
    for size in (millions / 4, millions):
        old, _ = stepped(int(size * 1e6), 0.0)
        count = sum(len(one.view) for one in old) // 2
        fewest, few = (
            [from_numpy(one.name, moved(one, changed / count), "BF16") for one in old]
            for changed in (FEW / 100, FEW)
        )
        scan, encode = (partial(encode_delta, old, one, limit=FAR) for one in (fewest, few))
        scan_s, encode_s = (min(cpu_s(one) for _ in range(REPEATS)) for one in (scan, encode))
        above.append(encode_s - scan_s)
        rows.append(
            {
                "section": f"{FEW:,} changed weights",
                "weights": f"{size:g}M",
                "scan CPU s": scan_s,
                "encode CPU s": encode_s,
                "above the scan CPU s": encode_s - scan_s,
            }
        )
    name = "cost above the scan of as many changed weights among 4 times as many"
    if min(above) <= 0:
        return rows, Goal(f"minus {name}", -1.5, 0.0, None)
    return rows, at_most(name, 1.5, above[1] / above[0])


def _apply(stream: bytes, tensors: list[NamedTensor]) -> None:
    for _ in apply_delta(stream, tensors):
        pass
