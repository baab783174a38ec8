"""Marks of tests that need hosts with separate network namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.namespaces import why_none

_WHY_NONE = why_none()
_TUN = Path("/dev/net/tun")
WITH_NAMESPACES = pytest.mark.skipif(bool(_WHY_NONE), reason=_WHY_NONE)
WITH_TAPS = pytest.mark.skipif(not _TUN.exists(), reason=f"needs {_TUN}, of which links are made")
