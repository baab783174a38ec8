"""Noise made from valid bytes, and a driver that limits its time.

With PACELINE_FUZZ_S each property sees new noise for so many seconds. Otherwise it sees a few
examples, the same in every run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given, seed, settings
from hypothesis import strategies as st

from paceline.local.patience import patient

BUDGET_S = float(os.environ.get("PACELINE_FUZZ_S", "0"))
FEW, MANY = 30, 300
SLOWEST_S = 1.0
ODDITIES: tuple[Any, ...] = (
    *(None, True, "", "\0", "\ud800", "é", "a" * 3000, [], {}, [[]], [None], {"a": None}),
    *(0, -1, 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), float("-inf"), {"type": 1}, {"": {"": []}}, ["a", 1, None]),
)
"""JSON values, and some values that only Python's parser accepts, used as replacements."""
SPLICES = (
    *(b"", b"\0", b"\xff", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\n", b"\r\n", b"-"),
    *(b"[" * 5000, b'{"a":' * 5000, b"9" * 5000, b"1e999", b"NaN", b"null", b"\\ud800", b"data: "),
    *(
        b"\x80" * 11,
        b"\xff" * 10 + b"\x01",
        (2**63).to_bytes(8, "little"),
        b"<tool_call>",
        b"<think>",
    ),
)


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values inside a JSON value, its own path first."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [here, *(path for key, one in inner for path in paths(one, (*here, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The value with another value at a path; `...` removes the old value."""
    if not path:
        return None if new is ... else new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is ...:
        del copy[path[0]]
    else:
        copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


@st.composite
def noise(draw: st.DrawFn, valid: Sequence[bytes]) -> bytes:
    """Valid bytes with a defect, or arbitrary bytes."""
    kind = draw(st.sampled_from(("json", "splice", "splice", "any")))
    if kind == "any":
        return draw(st.binary(max_size=200))
    raw = draw(st.sampled_from(valid))
    if kind == "json":
        try:
            value = json.loads(raw)
        except ValueError:
            pass  # a different form, whose bytes are spliced in
        else:
            for _ in range(draw(st.integers(1, 3))):
                path = draw(st.sampled_from(paths(value)))
                value = replaced(value, path, draw(st.sampled_from((..., *ODDITIES))))
            return json.dumps(value).encode()
    spoiled = bytearray(raw)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(spoiled)))
        size = draw(st.sampled_from((0, 0, 1, 1, 4, 1 << 20)))
        splice = st.sampled_from(SPLICES) | st.binary(min_size=1, max_size=4)
        spoiled[start : start + size] = draw(splice)
    return bytes(spoiled)


def fuzz(valid: Sequence[bytes], read: Callable[[bytes], object]) -> None:
    """Passes noise to `read` until the time is up; `read` raises on a forbidden result."""

    def hold(raw: bytes) -> None:
        began = time.process_time()
        read(raw)
        if BUDGET_S:  # processor time, so that a busy machine does not count
            took_s = time.process_time() - began
            assert took_s < patient(SLOWEST_S), f"{took_s:.1f} s for {len(raw)} bytes"

    examples = MANY if BUDGET_S else FEW
    bounds = settings(max_examples=examples, deadline=None, derandomize=not BUDGET_S, database=None)
    until_s, rounds = time.monotonic() + BUDGET_S, 0
    while rounds == 0 or time.monotonic() < until_s:
        run = bounds(given(noise(valid))(hold))
        (seed(time.time_ns())(run) if BUDGET_S else run)()
        rounds += 1
