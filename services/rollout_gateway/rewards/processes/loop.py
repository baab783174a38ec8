"""The child's end of the frames: its pipes, its loop and its death with the gateway. Owns no rule.

Frames come over stdin and go over stdout, which the child takes away at once: code that prints
writes to stderr, code that reads stdin sees its end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from paceline.errors import PacelineError
from rollout_gateway.rewards.processes import frames

PARENT_VARIABLE = "PACELINE_REWARD_PARENT"
"""Process id of the gateway, set by it."""
MAX_TRACE = 4000
"""Characters of an exception's text that travel; the end is kept."""
_PR_SET_PDEATHSIG = 1


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
    while (request := frames.read(requests)) is not None:
        try:
            given = answer(request)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a rule raises is the answer
            given = {"raised": "".join(traceback.format_exception(error))[-MAX_TRACE:]}
        tell(answers, given)


def tell(answers: BinaryIO, value: Mapping[str, Any]) -> None:
    """Send one frame."""
    answers.write(frames.encode(value))
    answers.flush()


def refused(error: PacelineError) -> dict[str, Any]:
    """What the gateway is to raise as ConfigError."""
    return {"refused": {"message": error.message, "seen": error.seen, "allowed": error.allowed}}
