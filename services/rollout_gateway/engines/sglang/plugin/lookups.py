"""Times SGLang's prefix cache: how long it takes to find what of a prompt is cached.

What is found stays where it is, so nothing is copied. The cache is taken hold of as the scheduler
has it, whichever of SGLang's kinds it is.
"""

from __future__ import annotations

import time
from typing import Any

_KEEPS = "cache_unfinished_req"


class PrefixLookups:
    """Of one scheduler's cache; a prompt that waits is looked up again before each round."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        self._keeping = False

    def watch(self, cache: Any) -> None:
        """From now on."""
        match_prefix = cache.match_prefix

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._keeping:
                return match_prefix(*args, **kwargs)
            began = time.perf_counter()
            try:
                return match_prefix(*args, **kwargs)
            finally:
                self.count += 1
                self.seconds += time.perf_counter() - began

        cache.match_prefix = timed
        keep = getattr(cache, _KEEPS, None)  # None from 0.5.23 on, where it looks up nothing
        if keep is None:
            return

        def keeping(*args: Any, **kwargs: Any) -> Any:
            self._keeping = True  # the cache looks up what it has just put in, for itself
            try:
                return keep(*args, **kwargs)
            finally:
                self._keeping = False

        setattr(cache, _KEEPS, keeping)
