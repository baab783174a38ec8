"""Stretches deadlines of process starts, and of tests, by how busy this machine is.

The factor is PACELINE_PATIENCE where that is set, else one more than the load per core.
"""

from __future__ import annotations

import os

from paceline.errors import ConfigError

VARIABLE = "PACELINE_PATIENCE"


def patience() -> float:
    """The factor now, at least 1 unless it is given. Raises ConfigError."""
    given = os.environ.get(VARIABLE)
    if not given:
        # One more, because the load average lags: what raised it may have begun a second ago.
        return 1.0 + os.getloadavg()[0] / (os.cpu_count() or 1)
    try:
        factor = float(given)
    except ValueError:
        factor = 0.0
    if not 0.0 < factor < float("inf"):
        raise ConfigError(f"{VARIABLE} is not a factor", seen=given, allowed="a number above 0")
    return factor


def patient(seconds: float) -> float:
    """A deadline that is right on a quiet machine, as it should be on this one now."""
    return seconds * patience()
