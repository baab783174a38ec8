"""Links two network interfaces that it makes, and delays or drops the frames between them.

netem does the same, but not every kernel has netem.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME_BYTES = 65_536
_SEED = 20


def tap(name: str) -> int:
    """Makes a TAP interface; returns the descriptor that reads and writes its frames."""
    found = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(found, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return found


def pass_on(ends: tuple[int, int], delay_s: float, loss: float) -> None:
    """Forwards frames between both ends, without end."""
    draw, other = random.Random(_SEED), {ends[0]: ends[1], ends[1]: ends[0]}
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        rest = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        for end in select.select(ends, (), (), rest)[0]:
            frame = os.read(end, _FRAME_BYTES)
            number += 1
            if draw.random() >= loss:
                due = time.monotonic() + delay_s
                heapq.heappush(waiting, (due, number, other[end], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(waiting)
            try:
                os.write(end, frame)
            except OSError:  # the interface is not up yet, or full: the frame is lost
                continue


if __name__ == "__main__":
    made = tap(sys.argv[1]), tap(sys.argv[2])
    print("there", flush=True)
    pass_on(made, float(sys.argv[3]) / 1000, float(sys.argv[4]))
