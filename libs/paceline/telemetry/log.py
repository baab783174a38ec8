"""Writes structured log lines to stderr with their trace."""

import logging
import sys
from typing import Any

import structlog
from opentelemetry.trace import get_current_span
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

_EXPORTS = (
    "opentelemetry.exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.sdk.metrics._internal.export",
)
"""OpenTelemetry's loggers about exports."""


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger whose lines carry `source=name`; usable before `configure_log`."""
    logger: FilteringBoundLogger = structlog.get_logger(source=name)
    return logger


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
