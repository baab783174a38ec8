"""How many cases hypothesis draws."""

from __future__ import annotations

from hypothesis import settings

LEAST = 10


def case_count(number: int) -> int:
    """`number`, or a quarter of it in `make test`; at least 10."""
    return max(LEAST, number * settings.default.max_examples // 100)
