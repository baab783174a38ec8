"""uvicorn's HTTP/1.1 protocol with two additions. It bounds a request's head, its trailers and late
bytes after the answer, and it can write a part of a streamed body at once.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 << 10
"""Maximum bytes of the request line and all headers."""
MAX_FIELDS = 256
"""Maximum headers and trailers of a request."""
MAX_LATE_BYTES = 16 << 20
"""Maximum bytes of a body that are discarded after its answer, so that the client finishes and
reads the answer.
"""
PARTS, BODY = "paceline.parts", "body"
"""The ASGI extension, and its key for the BodyParts of a request."""


class BodyParts:
    """Writes parts of a streamed body synchronously, between two parts sent through ASGI's `send`.

    The engine's chunks for many connections arrive in one turn of the event loop. A coroutine for
    each, through all layers of an application, would cost more than the write.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def ready(self) -> bool:
        """Whether `write` may be called now: the answer has begun, and its client reads."""
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding  # set only after the head, for a body without a length
            and not cycle.flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
        )

    def write(self, data: bytes) -> None:
        """Write one part, not empty: a single system call if the client reads."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A client beyond the limits gets a 400, or loses the connection after its
    answer.
    """

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
            raise ValueError("too many headers")  # the parser turns it into a bad request
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not None and self.cycle is not before:
            self.cycle.scope["extensions"] = {PARTS: {BODY: BodyParts(self.cycle)}}
