"""Forwards bytes between clients and a server, with the faults of a network."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

_CHUNK_BYTES = 1 << 16
_LARGE_BYTES = 4096
PUSH_BYTES = 1 << 18
"""Bytes from a client in one connection that mark a push: more than commands, less than a version.
"""
_RST = struct.pack("ii", 1, 0)  # SO_LINGER: close drops unsent bytes and resets


@dataclass(eq=False)
class _Line:
    """One client's connection and its counterpart at the server."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    sent: int = 0  # bytes from the client since its last pause
    deaf: bool = False  # drops all bytes from the client
    pumps: list[asyncio.Task[None]] = field(default_factory=list)

    def reset(self) -> None:
        for writer in (self.client, self.server):
            found = writer.get_extra_info("socket")
            if found is not None and found.family != socket.AF_UNIX:
                with suppress(OSError):
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
            writer.transport.abort()


class Proxy:
    """Listens at one address for one server; an address is "host:port" or the path of a socket."""

    def __init__(self, here: str, there: str, on_push: Callable[[], None] = lambda: None) -> None:
        """`on_push` is called when one connection has sent PUSH_BYTES without a pause of a
        second.
        """
        self._here, self._there, self._on_push = here, there, on_push
        self._lines: set[_Line] = set()
        self._server: asyncio.Server | None = None
        self._delay_s = 0.0
        self._corrupt: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Starts to listen."""
        if self._here.startswith("/"):
            self._server = await asyncio.start_unix_server(self._serve, self._here)
            return
        host, _, port = self._here.rpartition(":")
        self._server = await asyncio.start_server(self._serve, host, int(port))

    async def close(self) -> None:
        """Ends every connection."""
        if self._server is not None:
            self._server.close()
        pumps = [pump for line in self._lines for pump in line.pumps]
        for line in list(self._lines):
            line.reset()
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

    @property
    def lines(self) -> int:
        """Number of open connections."""
        return len(self._lines)

    async def delay(self, each_s: float, for_s: float) -> None:
        """Delays every chunk by `each_s`, for `for_s` seconds."""
        self._delay_s = each_s
        await asyncio.sleep(for_s)
        self._delay_s = 0.0

    def reset(self) -> None:
        """Ends every connection now."""
        for line in list(self._lines):
            line.reset()

    def half_close(self) -> None:
        """Ends the client's side of every connection at the server; the server's answers still
        arrive.
        """
        for line in self._lines:
            line.deaf = True
            with suppress(OSError, RuntimeError):
                line.server.write_eof()

    async def corrupt(self, deadline_s: float) -> None:
        """Flips the middle byte of the next large chunk of a client, and returns then.

        Raises TimeoutError if there is no such chunk in time.
        """
        self._corrupt = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline_s):
                await self._corrupt
        finally:
            self._corrupt = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._there.startswith("/"):
                back, there = await asyncio.open_unix_connection(self._there)
            else:
                host, _, port = self._there.rpartition(":")
                back, there = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()  # as if no server listened
            return
        line = _Line(writer, there)
        self._lines.add(line)
        line.pumps = [
            asyncio.create_task(self._pump(line, reader, there, True)),
            asyncio.create_task(self._pump(line, back, writer, False)),
        ]
        await asyncio.gather(*line.pumps, return_exceptions=True)
        self._lines.discard(line)
        for one in (writer, there):
            one.close()

    async def _pump(
        self,
        line: _Line,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        from_client: bool,
    ) -> None:
        quiet_since = asyncio.get_running_loop().time()
        try:
            while data := await reader.read(_CHUNK_BYTES):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                if from_client:
                    now = asyncio.get_running_loop().time()
                    line.sent = line.sent * (now - quiet_since < 1.0) + len(data)
                    quiet_since = now
                    data = self._passed(line, data)
                if data:
                    writer.write(data)
                    await writer.drain()
            writer.write_eof()
        except (OSError, RuntimeError):  # one end is gone: reset the other end too
            line.reset()

    def _passed(self, line: _Line, data: bytes) -> bytes:
        """The bytes of a client's chunk to forward."""
        if line.deaf:
            return b""
        if line.sent >= PUSH_BYTES:
            line.sent = -(1 << 40)  # calls `on_push` once a push
            self._on_push()
        if self._corrupt is not None and not self._corrupt.done() and len(data) >= _LARGE_BYTES:
            self._corrupt.set_result(None)
            middle = len(data) // 2
            return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
        return data
