"""Imports modules without garbage collection, which otherwise takes a quarter of the import time.

Imports only the standard library, because its callers have imported nothing yet.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disables garbage collection in the block and exempts its objects from later collections.

    A later collection takes a tenth of a second, and in forks it writes to shared pages. The little
    garbage of the block therefore remains.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
