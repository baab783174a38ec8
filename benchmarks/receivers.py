"""Receives the transport bench's data: `python -m benchmarks.receivers weights|tcp|redis ARGS`.

Each receiver prints one JSON line when ready and one per request. It ends when its standard input
closes.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
import tempfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import uvloop

from paceline.config import SecurityConfig
from paceline.errors import DataLoss
from paceline.processor import keep_freed_memory
from paceline.rpc import EpochGuard, Server
from paceline.streams import RedisStream, connect, decode_features
from paceline.trajectory import VersionSet
from paceline.v1.weights_pb2_grpc import add_WeightServiceServicer_to_server
from paceline.weights import SERVICE_NAME, Spool, WeightServicer
from paceline.weights.chunks import allocate

CHUNK_HEAD = struct.Struct("<QII")
"""Raw copy: offset, length and CRC-32 of a chunk."""
TOTAL = struct.Struct("<Q")
"""Raw copy: number of bytes that follow; 8 zero bytes end the connection."""
GROUP = "bench"


class NoWorkers:
    """Hooks of a receiver without workers."""

    async def on_prepared(self, target: int, version: int, path: Path) -> None:
        """Loads nothing."""

    async def on_commit(
        self, versions: VersionSet, mode: int, leased: Collection[int], *, judge: bool | None = None
    ) -> None:
        """Serves nothing."""

    async def on_abort(self, target: int, version: int) -> None:
        """Drops nothing."""


def tell(**facts: Any) -> None:
    """Prints one JSON line for the bench."""
    print(json.dumps(facts), flush=True)


async def receive_weights() -> None:
    """Serves WeightService over gRPC with a spool in a temporary directory, as the gateway does."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        server = Server("127.0.0.1:0", SecurityConfig())
        spool = Path(directory) / "spool"
        servicer = WeightServicer(Spool(spool), EpochGuard(SecurityConfig()), NoWorkers())
        server.add(add_WeightServiceServicer_to_server, servicer, SERVICE_NAME)
        tell(port=await server.start())
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(1)


def receive_tcp() -> None:
    """Receives the raw copy: places each chunk in one buffer and checks its CRC-32 there.

    One byte answers the last chunk.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tell(port=listener.getsockname()[1])
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = memoryview(bytearray(CHUNK_HEAD.size))
        while total := TOTAL.unpack(_fill(connection, head[: TOTAL.size]))[0]:
            buffer = allocate(total)
            left = total
            while left:
                offset, length, crc = CHUNK_HEAD.unpack(_fill(connection, head))
                if zlib.crc32(_fill(connection, buffer[offset : offset + length])) != crc:
                    raise DataLoss("a chunk of the raw copy is corrupt", seen=offset)
                left -= length
            connection.sendall(b"\x01")


def _fill(connection: socket.socket, view: memoryview) -> memoryview:
    done = 0
    while done < len(view):
        read = connection.recv_into(view[done:], 0, socket.MSG_WAITALL)
        if not read:
            raise SystemExit(0)
        done += read
    return view


async def receive_redis(url: str) -> None:
    """Reads, checks and acknowledges entries; each line on standard input gives their number."""
    client = connect(url)
    tell(ready=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        stream = RedisStream(client, request["key"])
        left = request["entries"]
        while left:
            entries = await stream.read(GROUP, "reader", request["count"], block_s=10)
            for entry in entries:
                if zlib.crc32(entry.payload) != int(entry.fields["crc32"]):
                    raise DataLoss("an entry is corrupt", seen=entry.id)
                decode_features(entry.fields, entry.payload)
            await stream.ack(GROUP, [entry.id for entry in entries])
            left -= len(entries)
        await stream.close()
        tell(done=True)

    await client.aclose()


def main(argv: list[str]) -> None:
    """Runs the receiver named in `argv`."""
    keep_freed_memory()
    match argv:
        case ["tcp"]:
            receive_tcp()
        case ["weights"]:
            uvloop.run(receive_weights())
        case ["redis", url]:
            uvloop.run(receive_redis(url))
        case _:
            raise SystemExit(f"no such receiver: {argv}; weights, tcp or redis URL")


if __name__ == "__main__":
    main(sys.argv[1:])
