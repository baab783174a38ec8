"""Stops the exporters of a process within a time limit, whether or not their collector answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.exporter import OTLPExporterMixin

_CUT_S = 0.5
"""Seconds in which an exporter returns after its connection was closed."""
_log = logging.getLogger("opentelemetry.exporter.paceline")


def stop_in_time(
    stops: Sequence[Callable[[], object]],
    exporters: Sequence[OTLPExporterMixin[Any, Any, Any, Any]],
    limit_s: float,
) -> None:
    """Calls all stops at once; each sends its queue and ends its exporter.

    A failed export is not retried. Exports that take longer than `limit_s` seconds are cut off and
    lose their data; a warning names the endpoints.
    """
    for exporter in exporters:
        exporter._shutdown_in_progress.set()  # ends its backoff of up to 10 s; no public API does
    threads = [Thread(target=stop, daemon=True) for stop in stops]
    for thread in threads:
        thread.start()
    if _ended(threads, limit_s):
        return
    endpoints = ", ".join(sorted({exporter._endpoint for exporter in exporters}))
    _log.warning("telemetry is lost: no answer from %s in %g s", endpoints, limit_s)
    for exporter in exporters:
        exporter.shutdown()
    _ended(threads, _CUT_S)


def _ended(threads: Sequence[Thread], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
