"""A module to be forked: notes each import, and does in main as it is told."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time

IMPORTED_BY = os.getpid()
print("imported", flush=True)
match os.environ.get("STUB_IMPORT"):
    case "thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    case "broken":
        raise ValueError("no such device")
    case "slow":
        time.sleep(600)


def main() -> int:
    facts = {
        "imported_by": IMPORTED_BY,
        "parent": os.getppid(),
        "as": __name__,
        "argv": sys.argv,
        "input": sys.stdin.read(),
        "word": os.environ["WORD"],
        "drawn": random.random(),
        "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "sigchld": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }
    print(json.dumps(facts), flush=True)
    if os.environ["WORD"] == "wait":
        signal.pause()
    return 3


if __name__ == "__main__":
    sys.exit(main())
