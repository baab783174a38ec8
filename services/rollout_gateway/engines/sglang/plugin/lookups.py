"""Counts and times lookups in SGLang's prefix cache, which find the cached part of a prompt.

A lookup copies nothing. The wrapper works on the scheduler's cache object, of any kind.
"""

from __future__ import annotations

import time
from typing import Any

_KEEPS = "cache_unfinished_req"


class PrefixLookups:
    """Lookups of one scheduler's cache; a waiting prompt is looked up again before each round."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        self._keeping = False

    def watch(self, cache: Any) -> None:
        """Measure the lookups of a cache from now on."""
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
        keep = getattr(cache, _KEEPS, None)  # None from SGLang 0.5.23 on: no lookups to exclude
        if keep is None:
            return

        def keeping(*args: Any, **kwargs: Any) -> Any:
            self._keeping = True  # the cache's own lookup of a new entry does not count
            try:
                return keep(*args, **kwargs)
            finally:
                self._keeping = False

        setattr(cache, _KEEPS, keeping)
