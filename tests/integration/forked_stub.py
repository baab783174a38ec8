"""A module to be forked: notes each import, and follows its arguments in main."""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

IMPORTED_BY = os.getpid()
TURNS = os.environ.get("GOMP_SPINCOUNT")  # libraries read it at their import
print("imported", flush=True)
match os.environ.get("STUB_IMPORT"):
    case "thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    case "broken":
        raise ValueError("no such device")
    case "slow":
        time.sleep(600)


def main() -> int | None:
    facts = {
        "imported_by": IMPORTED_BY,
        "parent": os.getppid(),
        "as": __name__,
        "argv": sys.argv,
        "input": sys.stdin.read(),
        "word": os.environ["WORD"],
        "turns": TURNS,
        "drawn": random.random(),
        "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "sigchld": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }
    print(json.dumps(facts), flush=True)
    match os.environ["WORD"]:
        case "wait":
            signal.pause()
        case "late":
            _leave_work_behind()
        case "nothing":
            return None
    return 3


def _leave_work_behind() -> None:
    atexit.register(print, "at exit")
    threading.Timer(0.2, print, ("a thread",)).start()
    ThreadPoolExecutor(1).submit(time.sleep, 0.1).add_done_callback(lambda _: print("a pool"))


if __name__ == "__main__":
    sys.exit(main())
