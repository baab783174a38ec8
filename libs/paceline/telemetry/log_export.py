"""Sends log records to an OTLP endpoint, each with its trace and span.

No caller waits for the endpoint: records queue in OpenTelemetry's batch processor, which drops
records beyond its capacity.
"""

from __future__ import annotations

import sys
from typing import Any

from opentelemetry._logs import SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from structlog.typing import EventDict, Processor, WrappedLogger

from paceline.telemetry.metrics import SCOPE

_SEVERITY = {
    "debug": SeverityNumber.DEBUG,
    "info": SeverityNumber.INFO,
    "warning": SeverityNumber.WARN,
    "error": SeverityNumber.ERROR,
    "critical": SeverityNumber.FATAL,
}
_SAID_ELSEWHERE = frozenset(
    ("event", "timestamp", "level", "service", "trace_id", "span_id", "exc_info")
)
OWN = "opentelemetry"
"""OpenTelemetry's own records are not exported: a record about a failed export would be exported
next.
"""


def otlp_logs(resource: Resource, exporter: OTLPLogExporter) -> LoggerProvider:
    """A provider that sends its records to the exporter."""
    provider = LoggerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
    return provider


def exporting(provider: LoggerProvider) -> Processor:
    """Passes each record to the provider and leaves the record unchanged."""
    logger = provider.get_logger(SCOPE)

    def export(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        if str(event.get("source", "")).startswith(OWN):
            return event
        level = str(event.get("level", "info"))
        attributes = {
            key: value if isinstance(value, str | bool | int | float) else str(value)
            for key, value in event.items()
            if key not in _SAID_ELSEWHERE and not key.startswith("_")
        }
        logger.emit(
            body=str(event.get("event", "")),
            severity_text=level,
            severity_number=_SEVERITY.get(level, SeverityNumber.INFO),
            attributes=attributes,
            exception=_exception(event.get("exc_info")),
        )
        return event

    return export


def _exception(told: Any) -> BaseException | None:
    """The exception in structlog's and logging's value of `exc_info`."""
    if isinstance(told, BaseException):
        return told
    if isinstance(told, tuple):
        return told[1] if isinstance(told[1], BaseException) else None
    return sys.exc_info()[1] if told else None
