"""The gateway's end of an engine worker's socket: messages are given out in the turn of the event
loop that reads them, without a future and a task's wake-up for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq


class WorkerSocket:
    """Bound to an address that one worker connects to. Use on one event loop."""

    def __init__(
        self, context: zmq.Context[Any], address: str, on_message: Callable[[bytes], None]
    ) -> None:
        """What `on_message` raises is raised by nobody here: the event loop logs it, and goes on
        with the next message.
        """
        self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # commands wait here while the worker is busy
        self._socket.bind(address)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self.read)
        self.received = 0
        """Messages so far."""

    def send(self, message: bytes) -> None:
        """Send without waiting; a worker that is gone gets nothing."""
        with suppress(zmq.Again):
            self._socket.send(message, zmq.NOBLOCK)
        # Its descriptor tells of the first of the messages that wait, and sending may have taken
        # that note away.
        self._loop.call_soon(self.read)

    def read(self) -> None:
        """Give out one message, and the next in the next turn of the event loop: a worker that is
        faster than what becomes of its news must not keep everything else waiting.
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
        """Nothing is sent or given out any more."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
