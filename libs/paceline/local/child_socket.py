"""The parent's end of a child's socket. It delivers messages in the event loop turn that
reads them, without a future or a task's wake-up.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq


class ChildSocket:
    """Bound to an address that one child connects to. Use on one event loop."""

    def __init__(
        self, context: zmq.Context[Any], address: str, on_message: Callable[[bytes], None]
    ) -> None:
        """The event loop logs an exception of `on_message`, and reading continues with the next
        message.
        """
        self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # commands queue here while the child is busy
        self._socket.bind(address)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self.read)
        self.received = 0
        """Messages received so far."""

    def send(self, message: bytes) -> None:
        """Send without waiting; messages to a lost child are dropped."""
        with suppress(zmq.Again):
            self._socket.send(message, zmq.NOBLOCK)
        # The descriptor signals only the first waiting message, and sending may have cleared that
        # signal.
        self._loop.call_soon(self.read)

    def read(self) -> None:
        """Deliver one message, and schedule the next read in the next turn of the event loop. A
        fast child must not starve the rest of the loop.
        """
        if self._socket.closed:
            return
        try:
            message = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        self.received += 1
        self._loop.call_soon(self.read)
        self._on_message(message)

    def close(self) -> None:
        """Stop sending and delivering."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
