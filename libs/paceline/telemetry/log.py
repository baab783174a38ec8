"""Writes structured log lines with their trace to stderr, and to an OTLP endpoint."""

import logging
import sys
from typing import Any

import structlog
from opentelemetry._logs import LoggerProvider, SeverityNumber
from opentelemetry.trace import get_current_span
from structlog.typing import EventDict, Processor, WrappedLogger

from paceline.telemetry.metrics import SCOPE

_EXPORTS = (
    "opentelemetry.exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.sdk.metrics._internal.export",
)
"""OpenTelemetry's loggers about exports."""


def configure_log(service: str, level: str, as_json: bool, export: Processor | None = None) -> None:
    """Sends Paceline's lines, and libraries' lines from warning on, to stderr in one format.

    `export` receives each line as well.
    """

    def add_service(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_service,
        add_trace_ids,
    ]
    exported = [] if export is None else [export]
    # Tracebacks without local variables, which may hold a token or a prompt.
    plain = structlog.dev.plain_traceback
    rendering: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if as_json
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    )
    numeric = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, *exported, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(numeric),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )
    strip: Any = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, add_source, *exported], processors=[strip, *rendering]
    )
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(formatter)
    output.addFilter(OneFailedExport())
    logging.basicConfig(handlers=[output], level=max(numeric, logging.WARNING), force=True)


class OneFailedExport(logging.Filter):
    """Passes one record about failing exports, as a warning without a traceback. OpenTelemetry
    writes several for each signal every few seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passed = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        if not record.name.startswith(_EXPORTS):
            return True
        first, self._passed = not self._passed, True
        if first:
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return first


def add_source(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Adds the name of the logging library."""
    event["source"] = event["_record"].name
    return event


def add_trace_ids(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Adds the current trace and span, if there are any."""
    context = get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = f"{context.trace_id:032x}"
        event["span_id"] = f"{context.span_id:016x}"
    return event


_SEVERITY = {"warning": "WARN", "critical": "FATAL"}
"""OpenTelemetry's names of levels that differ from structlog's; a library's own level is INFO."""
_SENT_ELSEWHERE = frozenset(
    ("event", "timestamp", "level", "service", "trace_id", "span_id", "exc_info")
)
OWN = "opentelemetry"
"""OpenTelemetry's own records are not exported: a record about a failed export would be exported
next.
"""


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
            if key not in _SENT_ELSEWHERE and not key.startswith("_")
        }
        logger.emit(
            body=str(event.get("event", "")),
            severity_text=level,
            severity_number=SeverityNumber.__members__.get(
                _SEVERITY.get(level, level.upper()), SeverityNumber.INFO
            ),
            attributes=attributes,
            exception=_exception(event.get("exc_info")),
        )
        return event

    return export


def _exception(info: Any) -> BaseException | None:
    """The exception in structlog's and logging's value of `exc_info`."""
    found = info[1] if isinstance(info, tuple) else info
    if found and not isinstance(found, BaseException):
        found = sys.exc_info()[1]
    return found or None
