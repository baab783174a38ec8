"""A rank for tests: says ready, answers each message, does as the message says."""

from __future__ import annotations

import json
import os

from paceline.ranks.group import RankLink

NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)


def main() -> None:
    link = RankLink.from_environment()
    if os.environ.get("RANK_ECHO") == "dies":
        raise SystemExit("no device for this rank")
    if os.environ.get("RANK_ECHO") != "silent":
        link.ready()
    while True:
        message = link.receive(60.0)
        if message == b"environment":
            link.send(json.dumps({name: os.environ[name] for name in NAMES}).encode())
        elif message == b"poll":
            link.send(b"nothing" if link.poll() is None else b"something")
        elif message is not None:
            link.send(message)


if __name__ == "__main__":
    main()
