"""Receives the coordinator bench's facts: `python -m benchmarks.listeners slow|echo ARGS`.

Each listener prints one JSON line when ready and one per request. It ends when its standard input
closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from paceline.errors import DeadlineExceeded
from paceline.events import FactSubscriber

PERIOD_S = 1.0
QUIET_S = 0.02
JOIN_S = 60.0


def tell(**facts: Any) -> None:
    """Prints one JSON line for the bench."""
    print(json.dumps(facts), flush=True)


async def slow(address: str, run_id: str) -> None:
    """Reads the waiting facts once a second, up to the number in the request.

    Prints how many facts it missed after the first.
    """
    missed = 0

    async def on_gap(first: int, last: int) -> None:
        nonlocal missed
        missed += last - first + 1

    with FactSubscriber(address, run_id, on_gap) as subscriber:
        tell(ready=True)
        heard, missed = (await subscriber.next(JOIN_S)).sequence, 0
        tell(joined=True)
        request = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        while not request.done() or heard < json.loads(request.result())["last"]:
            await asyncio.sleep(PERIOD_S)
            heard = await _read_all(subscriber, heard)
        tell(missed=missed)


async def _read_all(subscriber: FactSubscriber, heard: int) -> int:
    try:
        while True:
            heard = (await subscriber.next(QUIET_S)).sequence
    except DeadlineExceeded:
        return heard


async def echo(*addresses: str) -> None:
    """Answers each message with a byte. The last address gets the answers; the other addresses
    publish.
    """
    with zmq.asyncio.Context() as context:
        heard, answers = context.socket(zmq.SUB), context.socket(zmq.PUSH)
        heard.setsockopt(zmq.SUBSCRIBE, b"")
        for address in addresses[:-1]:
            heard.connect(address)
        answers.connect(addresses[-1])
        tell(ready=True)
        over = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        while not over.done():
            if await heard.poll(200):
                await heard.recv_multipart()
                await answers.send(b"\x01")


def main(argv: list[str]) -> None:
    """Runs the listener named in `argv`."""
    match argv:
        case ["slow", address, run_id]:
            uvloop.run(slow(address, run_id))
        case ["echo", *addresses]:
            uvloop.run(echo(*addresses))
        case _:
            raise SystemExit(f"no such listener: {argv}; slow ADDRESS RUN or echo ADDRESSES")


if __name__ == "__main__":
    main(sys.argv[1:])
