"""Reads a run's journal during the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import redis

from paceline.local.patience import patient
from paceline.streams.journal import unpack_entry

Entry = dict[str, Any]


class JournalTail:
    """Journal entries in order, from the first entry written after its creation."""

    def __init__(self, url: str, run_id: str) -> None:
        self._client = redis.Redis.from_url(url)
        self._key = f"paceline:{{{run_id}}}:journal"
        newest = self._client.xrevrange(self._key, count=1)
        self._last: bytes | str = newest[0][0] if newest else "0"
        self.seen: list[Entry] = []

    def until(self, matches: Callable[[Entry], bool], seconds: float) -> Entry:
        """The first of the following entries that matches. Raises AssertionError after so many
        seconds, or if the run ends before.
        """
        end = time.monotonic() + patient(seconds)
        while time.monotonic() < end:
            for _, entries in self._client.xread({self._key: self._last}, count=1, block=1000):
                for self._last, fields in entries:
                    self.seen.append(unpack_entry(*fields.values()))
                    if matches(self.seen[-1]):
                        return self.seen[-1]
                    assert self.seen[-1]["phase"] not in ("finished", "failed"), self.seen[-9:]
        raise AssertionError(f"the last of {len(self.seen)} entries: {self.seen[-1:]}")
