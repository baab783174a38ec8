"""HTTP/1.1 as uvicorn speaks it, with bounds on what belongs to no body: the head of a request,
trailers, and bytes that still come after the answer; and with a way to write a part of a streamed
body at once.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 << 10
"""Of the request line and all headers."""
MAX_FIELDS = 256
"""Headers and trailers of a request."""
MAX_LATE_BYTES = 16 << 20
"""Of a body that are thrown away after its answer, so that the client finishes and reads it."""
PARTS, BODY = "paceline.parts", "body"
"""The ASGI extension, and what of it holds the BodyParts of a request."""


class BodyParts:
    """Writes parts of a streamed body without awaiting anything, between two that went by ASGI's
    `send`: news of the engine come for many connections in one turn of the event loop, and a
    coroutine of each, through all layers of an application, costs more than what it writes.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def ready(self) -> bool:
        """Whether `write` may be called now: the answer has begun, and its client reads."""
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding  # only with a head that has been sent, and a body of no length
            and not cycle.flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
        )

    def write(self, data: bytes) -> None:
        """Write one part, not empty: where the client reads, one system call."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class BoundedProtocol(HttpToolsProtocol):
    """One connection; a client beyond the bounds gets a 400, or where it was answered the end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head_bytes = self._late_bytes = self._fields = 0

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        began = self._in_head
        super().data_received(data)
        cycle = self.cycle
        if began and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too large.")
        elif cycle is not None and cycle.response_complete:
            self._late_bytes += len(data)
            if self._late_bytes > MAX_LATE_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = self._late_bytes = self._fields = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > MAX_FIELDS or len(name) + len(value) > MAX_HEAD_BYTES:
            raise ValueError("too many headers")  # the parser makes it a bad request
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not None and self.cycle is not before:
            self.cycle.scope["extensions"] = {PARTS: {BODY: BodyParts(self.cycle)}}
