"""Imports a process's modules without looking for cycles meanwhile: a quarter of their time.

Imports nothing but the standard library: who uses it has imported nothing yet.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside the block nothing is collected. What it has made is not looked at afterwards either,
    the little that is garbage included: to find that would take a tenth of a second again, and in
    forks write to the pages that they share.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
