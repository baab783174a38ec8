"""Stretches deadlines of process starts and tests by the load of this machine.

The factor is PACELINE_PATIENCE if set, otherwise one plus the load per core.
"""

import asyncio
import os
from collections.abc import Awaitable
from typing import TypeVar

from paceline.errors import ConfigError, DeadlineExceeded

VARIABLE = "PACELINE_PATIENCE"
T = TypeVar("T")


def patience() -> float:
    """The current factor, at least 1 unless it is set. Raises ConfigError for an invalid
    setting.
    """
    given = os.environ.get(VARIABLE)
    if not given:
        # Add one, because the load average lags behind new load.
        return 1.0 + os.getloadavg()[0] / (os.cpu_count() or 1)
    try:
        factor = float(given)
    except ValueError:
        factor = 0.0
    if not 0.0 < factor < float("inf"):
        raise ConfigError(f"{VARIABLE} is not a factor", seen=given, allowed="a number above 0")
    return factor


def patient(seconds: float) -> float:
    """Converts a deadline for an idle machine to a deadline for this machine's current load."""
    return seconds * patience()


async def within(seconds: float, awaited: Awaitable[T], what: str) -> T:
    """Awaits a result. Raises DeadlineExceeded with `what` after `patient(seconds)`."""
    limit_s = patient(seconds)
    try:
        async with asyncio.timeout(limit_s):
            return await awaited
    except TimeoutError as error:
        raise DeadlineExceeded(what, seen=f"{limit_s:.0f} s") from error
