"""Frames between the gateway and a child that scores: four bytes of length, big-endian, then a JSON
object.

Owns the bytes, not what they say. JSON so that neither side can make the other run anything.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, BinaryIO

from paceline.errors import DataLoss, InvalidInput

MAX_BYTES = 64 << 20
"""Of one frame."""
HEADER_BYTES = 4


def encode(value: Mapping[str, Any]) -> bytes:
    """One frame. Raises InvalidInput for one over MAX_BYTES."""
    body = json.dumps(value).encode("ascii")
    if len(body) > MAX_BYTES:
        raise InvalidInput(
            "an episode is too large for a child process",
            seen=f"{len(body)} bytes",
            allowed=MAX_BYTES,
        )
    return len(body).to_bytes(HEADER_BYTES, "big") + body


async def receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next frame.

    Raises IncompleteReadError at the end of the stream, DataLoss for what is no frame.
    """
    header = await reader.readexactly(HEADER_BYTES)
    return decode(await reader.readexactly(body_bytes(header)))


def read(file: BinaryIO) -> dict[str, Any] | None:
    """The next frame of a blocking file; None at its end. Raises DataLoss."""
    header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    size = body_bytes(header)
    body = file.read(size)
    return decode(body) if len(body) == size else None


def body_bytes(header: bytes) -> int:
    """Bytes that follow a header. Raises DataLoss for more than MAX_BYTES."""
    size = int.from_bytes(header, "big")
    if size > MAX_BYTES:
        raise DataLoss("not the length of a frame", seen=size, allowed=f"0 to {MAX_BYTES}")
    return size


def decode(body: bytes) -> dict[str, Any]:
    """The object of a frame's body. Raises DataLoss."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataLoss(f"a frame is not JSON: {error}", seen=body[:40]) from error
    if not isinstance(value, dict):
        raise DataLoss("a frame is not a JSON object", seen=body[:40])
    return value
