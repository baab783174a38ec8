"""Carries frames between the gateway and a child that scores, and runs the child's loop.

A frame is four bytes of length, big-endian, then a JSON object: neither side can make the other run
anything. Frames come over stdin and go over stdout, which the child takes away at once: code that
prints writes to stderr, code that reads stdin sees its end.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from paceline.errors import DataLoss, InvalidInput, PacelineError

MAX_BYTES = 64 << 20
"""Of one frame."""
HEADER_BYTES = 4
PARENT_VARIABLE = "PACELINE_REWARD_PARENT"
"""Process id of the gateway, set by it."""
MAX_TRACE = 4000
"""Characters of an exception's text that travel; the end is kept."""
_PR_SET_PDEATHSIG = 1


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


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """(requests, answers). Afterwards descriptor 0 is empty and descriptor 1 is stderr."""
    requests, answers = os.dup(0), os.dup(1)  # not inherited by programs that the child starts
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return os.fdopen(requests, "rb"), os.fdopen(answers, "wb")


def die_with_gateway() -> None:
    """SIGKILL when the gateway ends, however it ends (Linux); elsewhere the closed pipe ends the
    child between calls.

    The gateway ends its children itself: an interrupt from the keyboard is not for them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.get(PARENT_VARIABLE, "")
    if parent and os.getppid() != int(parent):
        raise SystemExit(1)


def serve(
    answer: Callable[[Mapping[str, Any]], dict[str, Any]], requests: BinaryIO, answers: BinaryIO
) -> None:
    """Answer one request after the other until the gateway closes the pipe.

    An exception of `answer` is answered as {"raised": text}.
    """
    tell(answers, {"ready": os.getpid()})
    while (request := read(requests)) is not None:
        try:
            given = answer(request)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a rule raises is the answer
            given = {"raised": "".join(traceback.format_exception(error))[-MAX_TRACE:]}
        tell(answers, given)


def tell(answers: BinaryIO, value: Mapping[str, Any]) -> None:
    """Send one frame."""
    answers.write(encode(value))
    answers.flush()


def refused(error: PacelineError) -> dict[str, Any]:
    """What the gateway is to raise as ConfigError."""
    return {"refused": {"message": error.message, "seen": error.seen, "allowed": error.allowed}}
