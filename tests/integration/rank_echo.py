"""A rank for tests: reports that it is ready, answers each message, and executes commands in
messages.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

from paceline.ranks.group import RankLink
from paceline.ranks.messages import Doing
from paceline.services.policy_trainer.messages import MESSAGES

NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "PACELINE_RANK_STORE",
    "OMP_NUM_THREADS",
)


def speak_early(link: RankLink, spoken: Path) -> None:
    """Rank 0 is ready and sends news; the other ranks are ready afterwards."""
    if link.rank == 0:
        link.ready()
        link.send(b"news")
        spoken.touch()
        return
    while not spoken.exists():
        link.receive(0.01)
    link.ready()


def start_slowly(link: RankLink, how: str, seconds: float) -> None:
    """Delays readiness by so many seconds. It reports progress, computes (at intervals as under ten
    times the load, or all the time), or does nothing.
    """
    end = time.monotonic() + seconds
    while (left_s := end - time.monotonic()) > 0:
        if how == "reports":
            link.send(MESSAGES.encode(Doing(f"loads, {left_s:.1f} s are left")))
        elif how in ("starved", "computes"):
            used_s = time.process_time()
            while time.process_time() < used_s + 0.04:
                pass
        if how != "computes":
            threading.Event().wait(0.2)


def main() -> None:
    link = RankLink.from_environment()
    if os.environ.get("RANK_ECHO") == "dies":
        raise SystemExit("no device for this rank")
    if how := os.environ.get("RANK_ECHO_SLOW"):
        start_slowly(link, how, float(os.environ["RANK_ECHO_SLOW_S"]))
    if spoken := os.environ.get("RANK_ECHO_EARLY"):
        speak_early(link, Path(spoken))
    elif os.environ.get("RANK_ECHO") != "silent":
        link.ready()
        for news in os.environ.get("RANK_ECHO_NEWS", "").splitlines():
            link.send(news.encode())
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
