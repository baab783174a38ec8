"""A process for the heartbeat's tests: answers beats, prints that it does, and obeys its input."""

from __future__ import annotations

import ctypes
import sys
import time

from paceline.local.heartbeat import _answering, answer_beats
from paceline.local.processes import die_with_parent


def main() -> int:
    die_with_parent()
    answer_beats()
    print("answers", flush=True)
    for line in sys.stdin:
        order, seconds = line.split()
        if order == "hold":  # a call from Python that lets no other thread of Python run
            ctypes.PyDLL(None).usleep(int(1e6 * float(seconds)))
        elif order == "away":  # as one whose threads all wait for memory to be read back
            _answering.pop().close()
            time.sleep(float(seconds))
            answer_beats()
        elif order == "spin":
            end = time.monotonic() + float(seconds)
            while time.monotonic() < end:
                pass
        else:
            return int(seconds)
        print(order, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
