"""Server-sent events: bytes in, JSON objects out.

Only CR and LF end a line here. `str.splitlines` and httpx's `iter_lines` also split at U+2028 and
similar characters, which a model may write and JSON does not escape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from paceline.errors import DataLoss

MAX_EVENT_BYTES = 16 << 20
DONE = b"[DONE]"
_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventReader:
    """Collects events from pieces cut anywhere. `done` is true after [DONE]."""

    def __init__(self) -> None:
        self.done = False
        self._rest = bytearray()
        self._searched = 0  # bytes of the rest without a line end
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[dict[str, Any]]:
        """The events completed by this piece.

        Raises DataLoss for an event that is too long or not a JSON object.
        """
        self._rest += piece
        while not self.done:
            # A CR at the very end may be half of CR LF.
            end = len(self._rest) - self._rest.endswith(b"\r")
            found = _LINE_END.search(self._rest, self._searched, end)
            if found is None:
                self._searched = end
                break
            line = bytes(self._rest[: found.start()])
            del self._rest[: found.end()]
            self._searched = 0
            if line:
                self._take(line)
                continue
            event = self._event()
            if event is not None:
                yield event

        held = len(self._rest) + sum(map(len, self._data))
        if held > MAX_EVENT_BYTES:
            raise DataLoss(
                "a streamed event is too long",
                seen=f"{held} bytes",
                allowed=f"{MAX_EVENT_BYTES} bytes",
            )

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":  # other lines are comments, ids and event names, which are unused
            self._data.append(value.removeprefix(b" "))

    def _event(self) -> dict[str, Any] | None:
        if not self._data:
            return None
        data = b"\n".join(self._data)
        self._data = []
        if data == DONE:
            self.done = True
            return None
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DataLoss("a streamed event is not JSON", seen=repr(data[:200])) from error
        if not isinstance(event, dict):
            raise DataLoss("a streamed event is not a JSON object", seen=repr(data[:200]))
        return event
