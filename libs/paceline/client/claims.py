"""Waiting for the next task of a training run.

Owns its patience; the gateway holds a question until a task comes.
"""

from __future__ import annotations

from paceline.client import calls
from paceline.client.answers import OpenedSession
from paceline.client.flows import Flow, Pause, ask
from paceline.client.settings import Settings, check_seconds

LONG_POLL_S = 30.0
EARLY_S = 1.0
"""A gateway that says "no task" without waiting is asked again after so long."""


def next_task(
    timeout_s: float, session_timeout_s: float | None, settings: Settings
) -> Flow[OpenedSession | None]:
    """A session for the next task; None when none came for `timeout_s`.

    Raises as `flows.ask` does.
    """
    clock = settings.backoff.clock
    end = clock() + check_seconds("timeout_s", timeout_s)
    while (asked := clock()) < end:
        wait_s = min(LONG_POLL_S, end - asked)
        opened = yield from ask(calls.claim(wait_s, session_timeout_s), settings)
        if opened is not None:
            return opened
        early = asked + min(EARLY_S, wait_s) - clock()
        if early > 0:
            yield Pause(early)
    return None
